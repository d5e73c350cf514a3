#include "csrc/ops/common/check.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "csrc/runtime/torch_call.h"

namespace {

thread_local std::string t_refusal;
thread_local std::string t_marked;
thread_local bool t_meta_passes = false;

}  // namespace

void metal_attn_let_meta_pass(int32_t pass) { t_meta_passes = pass != 0; }

const char* metal_attn_refusal(const char* text) {
  return t_refusal == text ? t_marked.c_str() : nullptr;
}

namespace metal_attn {

void refuse(const std::string& marked) {
  t_marked = marked;
  t_refusal = marked;
  std::erase(t_refusal, '`');
  throw std::invalid_argument(t_refusal);
}

namespace {

using torch::headeronly::DeviceType;

// The usual dtypes with their names in torch, and in Metal if kernels can index such tensors.
struct Dtype {
  ScalarType type;
  const char* name;
  const char* metal;
};
constexpr std::array<Dtype, 11> kUsualDtypes{
    {{ScalarType::Float, "float32", "float"},
     {ScalarType::Half, "float16", "half"},
     {ScalarType::BFloat16, "bfloat16", "bfloat"},
     {ScalarType::Double, "float64", nullptr},
     {ScalarType::Long, "int64", "int64_t"},
     {ScalarType::Int, "int32", "int"},
     {ScalarType::Bool, "bool", "uchar"},
     {ScalarType::Char, "int8", "char"},
     {ScalarType::Byte, "uint8", "uchar"},
     {ScalarType::Short, "int16", "short"},
     {ScalarType::Float8_e4m3fn, "float8_e4m3fn", nullptr}}};

// The dtypes of kElementNames.
constexpr std::initializer_list<ScalarType> kElements{ScalarType::Float, ScalarType::Half,
                                                      ScalarType::BFloat16};

std::string dtype_name(ScalarType dtype) {
  const auto entry = std::find_if(kUsualDtypes.begin(), kUsualDtypes.end(),
                                  [dtype](const Dtype& usual) { return usual.type == dtype; });
  return entry != kUsualDtypes.end() ? entry->name : torch::headeronly::toString(dtype);
}

void write_list(std::ostream& out, IntHeaderOnlyArrayRef values) {
  out << "(";
  for (std::size_t i = 0; i < values.size(); ++i) { out << (i > 0 ? ", " : "") << values[i]; }
  out << (values.size() == 1 ? ",)" : ")");
}

void write_marked(std::ostream& out, IntHeaderOnlyArrayRef values) {
  out << '`';
  write_list(out, values);
  out << '`';
}

void write_device(std::ostream& out, const Tensor& tensor) {
  const auto device = tensor.device();
  switch (device.type()) {
    case DeviceType::CPU:
      out << "cpu";
      break;
    case DeviceType::CUDA:
      out << "cuda:" << device.index();
      break;
    case DeviceType::MPS:
      out << "mps:" << std::max<int>(device.index(), 0);
      break;
    case DeviceType::Meta:
      out << "meta";
      break;
    default:
      out << "device type " << static_cast<int>(device.type());
  }
}

std::optional<Element> element_of(ScalarType dtype) {
  return dtype == ScalarType::Float      ? std::optional(Element::kFloat)
         : dtype == ScalarType::Half     ? std::optional(Element::kHalf)
         : dtype == ScalarType::BFloat16 ? std::optional(Element::kBfloat)
                                         : std::nullopt;
}

}  // namespace

std::string Counted::str() const {
  std::string text = std::to_string(count_) + " " + noun_;
  if (count_ == 1) { return text; }
  const bool is_consonant_y = text.back() == 'y' && text[text.size() - 2] != 'e';
  if (is_consonant_y) { text.replace(text.size() - 1, 1, "ie"); }
  return text + (text.back() == 's' ? "es" : "s");
}

std::string list_text(IntHeaderOnlyArrayRef values) {
  std::ostringstream text;
  write_list(text, values);
  return text.str();
}

TensorText shape_text(const Tensor& tensor) {
  return {[](std::ostream& out, const Tensor& t) { write_marked(out, t.sizes()); }, tensor};
}

TensorText stride_text(const Tensor& tensor) {
  return {[](std::ostream& out, const Tensor& t) { write_marked(out, t.strides()); }, tensor};
}

TensorText dtype_text(const Tensor& tensor) {
  return {[](std::ostream& out, const Tensor& t) { out << dtype_name(dtype_of(t)); }, tensor};
}

TensorText device_text(const Tensor& tensor) { return {write_device, tensor}; }

bool same_sizes(const Tensor& tensor, IntHeaderOnlyArrayRef sizes) {
  const auto actual = tensor.sizes();
  return std::equal(actual.begin(), actual.end(), sizes.begin(), sizes.end());
}

// Tensor::layout() is not in torch 2.10's headers.
bool is_strided(const Tensor& tensor) {
  int32_t layout = 0;
  TORCH_CALL(aoti_torch_get_layout(tensor.get(), &layout));
  return layout == aoti_torch_layout_strided();
}

namespace {

// A device in torch's numbers, which are read faster than a torch::stable::Device.
struct DeviceNumbers {
  int32_t type = 0;
  int32_t index = 0;

  bool operator==(const DeviceNumbers&) const = default;
};

DeviceNumbers device_numbers(const Tensor& tensor) {
  DeviceNumbers device;
  TORCH_CALL(aoti_torch_get_device_type(tensor.get(), &device.type));
  TORCH_CALL(aoti_torch_get_device_index(tensor.get(), &device.index));
  return device;
}

// Null if the dtype is not in kUsualDtypes.
const Dtype* usual_dtype(const Tensor& tensor) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  static const auto numbers = [] {
    std::array<int32_t, kUsualDtypes.size()> all{};
    std::transform(kUsualDtypes.begin(), kUsualDtypes.end(), all.begin(),
                   [](const auto& usual) { return to<int32_t>(from(usual.type)); });
    return all;
  }();
  int32_t number = 0;
  TORCH_CALL(aoti_torch_get_dtype(tensor.get(), &number));
  const auto index = std::find(numbers.begin(), numbers.end(), number) - numbers.begin();
  return index < std::ssize(numbers) ? &kUsualDtypes[static_cast<std::size_t>(index)] : nullptr;
}

}  // namespace

ScalarType dtype_of(const Tensor& tensor) {
  const Dtype* usual = usual_dtype(tensor);
  return usual != nullptr ? usual->type : tensor.scalar_type();
}

const char* metal_element(const Tensor& tensor) {
  const Dtype* usual = usual_dtype(tensor);
  return usual != nullptr ? usual->metal : nullptr;
}

void check_device(ArgumentName name, const Tensor& tensor) {
  check(tensor.defined(), name, " is None; it must be a tensor");
  const int32_t type = device_numbers(tensor).type;
  check(type == aoti_torch_device_type_mps() || type == aoti_torch_device_type_cpu() ||
            type == aoti_torch_device_type_meta(),
        name, " is on ", device_text(tensor),
        "; it must be on mps, or on cpu for the reference or the simulator");
  check(is_strided(tensor), name, " is sparse or otherwise not strided; call ", name,
        ".to_dense() first");
}

void check_same_device(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                       const Tensor& other) {
  check_device(name, tensor);
  check(device_numbers(tensor) == device_numbers(other) || (t_meta_passes && is_meta(tensor)), name,
        " is on ", device_text(tensor), " and ", other_name, " on ", device_text(other),
        "; they must be on one device");
}

// The stable ABI throws for quantised, 4-bit and shell dtypes.
void check_known_dtype(ArgumentName name, const Tensor& tensor, const char* allowed) {
  if (usual_dtype(tensor) != nullptr) { return; }
  try {
    tensor.scalar_type();
  } catch (const std::runtime_error&) {
    int32_t number = 0;
    TORCH_CALL(aoti_torch_get_dtype(tensor.get(), &number));
    check(false, name, " has an unknown dtype (number ", number, "); it must be ", allowed);
  }
}

ScalarType check_dtype(ArgumentName name, const Tensor& tensor,
                       std::initializer_list<ScalarType> allowed) {
  const Dtype* usual = usual_dtype(tensor);
  if (usual != nullptr && std::find(allowed.begin(), allowed.end(), usual->type) != allowed.end()) {
    return usual->type;
  }
  std::string names;
  for (const ScalarType* other = allowed.begin(); other != allowed.end(); ++other) {
    names += other == allowed.begin() ? "" : other + 1 == allowed.end() ? " or " : ", ";
    names += dtype_name(*other);
  }
  check_known_dtype(name, tensor, names.c_str());
  check(false, name, " has dtype ", dtype_text(tensor), "; it must be ", names);
  return *allowed.begin();
}

Element check_element(ArgumentName name, const Tensor& tensor) {
  return *element_of(check_dtype(name, tensor, kElements));
}

Element check_element(ArgumentName name, ScalarType dtype) {
  const std::optional<Element> element = element_of(dtype);
  check(element.has_value(), name, " is ", dtype_name(dtype), "; it must be ", kElementNames);
  return *element;
}

void check_same_dtype(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                      const Tensor& other) {
  check_known_dtype(name, tensor, kElementNames);
  check(dtype_of(tensor) == dtype_of(other), name, " has dtype ", dtype_text(tensor), " and ",
        other_name, " ", dtype_text(other), "; they must be the same");
}

void check_equal(ArgumentName name, int64_t size, ArgumentName other_name, int64_t other,
                 const char* noun) {
  check(size == other, name, " has ", noun, " of ", size, " and ", other_name, " of ", other,
        "; they must be equal");
}

void check_rank(ArgumentName name, const Tensor& tensor, int64_t rank, const char* layout) {
  check(tensor.dim() == rank, name, " has ", Counted{tensor.dim(), "dimension"}, ", shape ",
        shape_text(tensor), "; it must have ", rank, ": `", layout, "`");
}

int32_t check_length(ArgumentName name, const Tensor& tensor, int64_t dim, const char* noun) {
  const int64_t length = tensor.size(dim);
  check(length >= 0 && length <= kMaxLength, name, " has a ", noun, " of ", length,
        "; it must be in 0..", kMaxLength);
  return static_cast<int32_t>(length);
}

void check_offset(ArgumentName name, int64_t offset) {
  check(-kMaxLength <= offset && offset <= kMaxLength, name, " is ", offset, "; it must be in ",
        -kMaxLength, "..", kMaxLength);
}

int check_head_dim(ArgumentName name, int64_t head_dim, int max) {
  check(head_dim >= 1 && head_dim <= max, name, " has a head dim of ", head_dim,
        "; it must be in 1..", max);
  return static_cast<int>(head_dim);
}

void check_shape(ArgumentName name, const Tensor& tensor,
                 std::initializer_list<IntHeaderOnlyArrayRef> allowed) {
  for (const IntHeaderOnlyArrayRef shape : allowed) {
    if (same_sizes(tensor, shape)) { return; }
  }
  std::ostringstream texts;
  for (const IntHeaderOnlyArrayRef shape : allowed) {
    texts << (texts.tellp() > 0 ? " or " : "");
    write_marked(texts, shape);
  }
  check(false, name, " has shape ", shape_text(tensor), "; it must be ", texts.str());
}

void check_broadcasts(ArgumentName name, const Tensor& tensor,
                      const std::array<int64_t, 4>& shape) {
  const int64_t rank = tensor.dim();
  bool fits = rank <= 4;
  for (int64_t dim = 0; fits && dim < rank; ++dim) {
    const int64_t size = tensor.size(dim);
    fits = size == 1 || size == shape[static_cast<std::size_t>(4 - rank + dim)];
  }
  if (fits) { return; }
  check(false, name, " has shape ", shape_text(tensor), "; it must broadcast to ",
        list_text(IntHeaderOnlyArrayRef(shape)));
}

const int32_t* values_on_cpu(const OptionalTensor& tensor) {
  return tensor ? values_on_cpu(*tensor) : nullptr;
}

bool is_meta(const Tensor& tensor) {
  return device_numbers(tensor).type == aoti_torch_device_type_meta();
}

const int32_t* values_on_cpu(const Tensor& tensor) {
  return tensor.is_cpu() && tensor.numel() > 0
             ? static_cast<const int32_t*>(tensor.const_data_ptr())
             : nullptr;
}

void check_index(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                 const Tensor& other) {
  check_same_device(name, tensor, other_name, other);
  check_dtype(name, tensor, {ScalarType::Int});
  check(tensor.dim() == 1 && (tensor.numel() < 2 || tensor.stride(0) == 1), name, " has shape ",
        shape_text(tensor), " and strides ", stride_text(tensor),
        "; it must be contiguous with 1 dimension");
  check_storage(name, tensor);
}

void check_ends(ArgumentName name, const Tensor& cu_seqlens, const Tensor& q) {
  check_index(name, cu_seqlens, "q", q);
  check(cu_seqlens.numel() > 0, name, " is empty; it must contain 0 and the end of each sequence");
}

void check_steps(ArgumentName name, const Tensor& cu_seqlens, int64_t longest,
                 ArgumentName longest_name) {
  const int32_t* ends = values_on_cpu(cu_seqlens);
  for (int64_t i = 1; ends != nullptr && i < cu_seqlens.numel(); ++i) {
    const int64_t length = int64_t{ends[i]} - ends[i - 1];
    check(length >= 0, name, "[", i, "] is ", ends[i], " and ", name, "[", i - 1, "] is ",
          ends[i - 1], "; the elements must not decrease");
    check(length <= longest, name, " has a sequence of ", Counted{length, "row"}, " and ",
          longest_name, " is ", longest, "; no sequence may be longer");
  }
}

void check_cu_seqlens(ArgumentName name, const Tensor& cu_seqlens, int64_t total, int64_t longest,
                      ArgumentName longest_name) {
  const int32_t* ends = values_on_cpu(cu_seqlens);
  if (ends == nullptr) { return; }
  check(ends[0] == 0, name, "[0] is ", ends[0], "; it must be 0");
  check_steps(name, cu_seqlens, longest, longest_name);
  const int32_t end = ends[cu_seqlens.numel() - 1];
  check(end <= total, "the last element of ", name, " is ", end, " and there are ",
        Counted{total, "row"}, "; it must be at most ", total);
}

void check_statistics(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                      const Tensor& other, IntHeaderOnlyArrayRef shape) {
  check_same_device(name, tensor, other_name, other);
  check_dtype(name, tensor, {ScalarType::Float});
  check_shape(name, tensor, {shape});
  check_storage(name, tensor);
}

ScalarType check_operand(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                         const Tensor& other, std::initializer_list<ScalarType> dtypes,
                         std::initializer_list<IntHeaderOnlyArrayRef> shapes) {
  check_same_device(name, tensor, other_name, other);
  const ScalarType dtype = check_dtype(name, tensor, dtypes);
  check_shape(name, tensor, shapes);
  check_rows(name, tensor);
  return dtype;
}

Element check_sink(const Tensor& sink, int64_t heads, ArgumentName other_name,
                   const Tensor& other) {
  return *element_of(
      check_operand("learnable_sink", sink, other_name, other, kElements, {{heads}}));
}

void check_rows(ArgumentName name, const Tensor& tensor) {
  // contiguous() does not change the strides of a single column or of an empty tensor.
  const int64_t last = tensor.dim() - 1;
  check(tensor.size(last) == 1 || tensor.stride(last) == 1 || tensor.numel() == 0, name,
        " has strides ", stride_text(tensor), "; the last must be 1: call ", name,
        ".contiguous() first");
  check_storage(name, tensor);
}

void check_contiguous(ArgumentName name, const Tensor& tensor) {
  check(tensor.is_contiguous(), name, " has strides ", stride_text(tensor),
        "; it must be contiguous: pass what the op returned, or call ", name, ".contiguous()");
}

void check_storage(ArgumentName name, const Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) { return; }
    int64_t step = 0;
    const bool fits = !__builtin_mul_overflow(sizes[dim] - 1, strides[dim], &step) &&
                      !__builtin_add_overflow(last, step, &last);
    check(fits, name, " has shape ", shape_text(tensor), " and strides ", stride_text(tensor),
          "; the last element must be at a position below 2^63");
  }
  int64_t bytes = 0;
  TORCH_CALL(aoti_torch_get_storage_size(tensor.get(), &bytes));
  const int64_t element = static_cast<int64_t>(tensor.element_size());
  check(last < bytes / element, name, " has shape ", shape_text(tensor), " and strides ",
        stride_text(tensor), ", and a storage of ", Counted{bytes, "byte"}, ", which must hold ",
        Counted{last + 1, "element"}, ": it has been resized");
}

bool rows_aligned_16(const Tensor& tensor) { return rows_aligned(tensor, 16); }

uint64_t first_byte(const Tensor& tensor) {
  return tensor.is_cpu() ? reinterpret_cast<uintptr_t>(tensor.const_data_ptr())
                         : static_cast<uint64_t>(tensor.storage_offset()) * tensor.element_size();
}

bool rows_aligned(const Tensor& tensor, int multiple) {
  const int64_t bytes = static_cast<int64_t>(tensor.element_size());
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  bool aligned = first_byte(tensor) % static_cast<uint64_t>(multiple) == 0;
  for (std::size_t dim = 0; dim + 1 < sizes.size(); ++dim) {
    aligned = aligned && (sizes[dim] <= 1 || strides[dim] * bytes % multiple == 0);
  }
  return aligned;
}

int64_t last_position(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  int64_t last = 0;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) { last += (sizes[dim] - 1) * strides[dim]; }
  return last;
}

bool has_long_offsets(const Tensor& tensor) {
  return tensor.numel() > 0 && std::max(last_position(tensor) + 1, tensor.numel()) > kMaxLength;
}

bool has_long_offsets(const OptionalTensor& tensor) { return tensor && has_long_offsets(*tensor); }

}  // namespace metal_attn
