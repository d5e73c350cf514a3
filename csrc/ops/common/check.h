// Argument checks shared by the ops. Each throws std::invalid_argument, which becomes a ValueError
// in Python (from torch 2.15 on by torch_metal_attn/runtime/refusals.py). The message names the
// argument, its value and the allowed values.
#pragma once

#include <limits>

#include "csrc/problem/element.h"
#include "csrc/runtime/compile_error.h"

extern "C" {

// This thread's last refusal with its marks (see `refuse`), or null if its text is not `text`.
__attribute__((visibility("default"))) const char* metal_attn_refusal(const char* text);
// If 1, checks of this thread accept a tensor on meta together with tensors on another device,
// because `explain` of a backward has no results of a forward. Launches may then only be recorded.
__attribute__((visibility("default"))) void metal_attn_let_meta_pass(int32_t pass);

}  // extern "C"

namespace metal_attn {

// Throws std::invalid_argument with the text without its backquotes. Backquotes mark names, shapes
// and layouts of arguments, which torch_metal_attn/ops/names.py replaces for functions with other
// names or another order of dimensions.
[[noreturn]] void refuse(const std::string& marked);

// The name of an argument in a message.
class ArgumentName {
 public:
  constexpr ArgumentName(const char* name) : name_(name) {}

  friend std::ostream& operator<<(std::ostream& stream, const ArgumentName& argument) {
    return stream << '`' << argument.name_ << '`';
  }

 private:
  const char* name_;
};

// Shaders count positions in 32 bits, and their last step may exceed the end by less than a block.
inline constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max() - 1023;

// The most columns of values.
inline constexpr int kMaxHeadDimV = 512;

// A description of a tensor that is written only if a check fails.
class TensorText {
 public:
  using Write = void (*)(std::ostream&, const Tensor&);
  TensorText(Write write, const Tensor& tensor) : write_(write), tensor_(tensor) {}

  std::string str() const {
    std::ostringstream text;
    text << *this;
    return text.str();
  }
  friend std::ostream& operator<<(std::ostream& stream, const TensorText& text) {
    text.write_(stream, text.tensor_);
    return stream;
  }

 private:
  Write write_;
  const Tensor& tensor_;
};

TensorText shape_text(const Tensor& tensor);  // (2, 4, 128, 64)
TensorText stride_text(const Tensor& tensor);
TensorText device_text(const Tensor& tensor);  // mps:0
TensorText dtype_text(const Tensor& tensor);   // float16

// A number with its noun in a message: "1 head", "2 heads", "3 queries", "2 passes".
class Counted {
 public:
  constexpr Counted(int64_t count, const char* noun) : count_(count), noun_(noun) {}

  std::string str() const;
  friend std::ostream& operator<<(std::ostream& stream, const Counted& counted) {
    return stream << counted.str();
  }
  friend std::string operator+(const std::string& text, const Counted& counted) {
    return text + counted.str();
  }

 private:
  int64_t count_;
  const char* noun_;
};

template <typename... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) {
    std::ostringstream text;
    (text << ... << parts);
    refuse(text.str());
  }
}

std::string list_text(IntHeaderOnlyArrayRef values);

bool same_sizes(const Tensor& tensor, IntHeaderOnlyArrayRef sizes);

// Checks that the tensor is not None, is strided, and is on mps, the CPU or meta.
void check_device(ArgumentName name, const Tensor& tensor);
// Also checks that both tensors are on one device.
void check_same_device(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                       const Tensor& other);

inline constexpr char kElementNames[] = "float32, float16 or bfloat16";

// The same as tensor.scalar_type(), which is slower.
ScalarType dtype_of(const Tensor& tensor);

// The Metal type with which kernels index the tensor. Null for dtypes that they cannot index.
const char* metal_element(const Tensor& tensor);

ScalarType check_dtype(ArgumentName name, const Tensor& tensor,
                       std::initializer_list<ScalarType> allowed);

// Must be called before scalar_type(), which throws for some dtypes. allowed: for the message.
void check_known_dtype(ArgumentName name, const Tensor& tensor, const char* allowed);

Element check_element(ArgumentName name, const Tensor& tensor);
Element check_element(ArgumentName name, ScalarType dtype);
void check_same_dtype(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                      const Tensor& other);

// noun: with its article, such as "a batch".
void check_equal(ArgumentName name, int64_t size, ArgumentName other_name, int64_t other,
                 const char* noun);

// layout: such as "(batch, heads, length, head_dim)".
void check_rank(ArgumentName name, const Tensor& tensor, int64_t rank, const char* layout);

// Returns tensor.size(dim), which must be at most kMaxLength.
int32_t check_length(ArgumentName name, const Tensor& tensor, int64_t dim, const char* noun);

// Checks that the offset is in -kMaxLength..kMaxLength.
void check_offset(ArgumentName name, int64_t offset);

int check_head_dim(ArgumentName name, int64_t head_dim, int max);

void check_shape(ArgumentName name, const Tensor& tensor,
                 std::initializer_list<IntHeaderOnlyArrayRef> allowed);

void check_broadcasts(ArgumentName name, const Tensor& tensor, const std::array<int64_t, 4>& shape);

bool is_meta(const Tensor& tensor);

// The values of an int32 tensor on the CPU, or null. On mps the kernel checks the values.
const int32_t* values_on_cpu(const Tensor& tensor);
const int32_t* values_on_cpu(const OptionalTensor& tensor);

// Checks that the tensor is int32, one-dimensional, contiguous and on the device of `other`.
void check_index(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                 const Tensor& other);

// Calls check_index, and checks that the tensor is not empty.
void check_ends(ArgumentName name, const Tensor& cu_seqlens, const Tensor& q);

// Checks on the CPU that the length of every sequence is in 0..longest.
void check_steps(ArgumentName name, const Tensor& cu_seqlens, int64_t longest,
                 ArgumentName longest_name);

// Calls check_steps, and checks that the first value is 0 and the last value at most `total`.
void check_cu_seqlens(ArgumentName name, const Tensor& cu_seqlens, int64_t total, int64_t longest,
                      ArgumentName longest_name);

// Checks a tensor with a number per row, such as softmax_lse: float32, on the device of `other`.
void check_statistics(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                      const Tensor& other, IntHeaderOnlyArrayRef shape);

// Checks the dtype, the shape, the device, which must be that of `other`, and calls check_rows.
ScalarType check_operand(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                         const Tensor& other, std::initializer_list<ScalarType> dtypes,
                         std::initializer_list<IntHeaderOnlyArrayRef> shapes);

// Checks learnable_sink, a number per query head.
Element check_sink(const Tensor& sink, int64_t heads, ArgumentName other_name, const Tensor& other);

// Checks that the last stride is 1. Calls check_storage.
void check_rows(ArgumentName name, const Tensor& tensor);

// Checks a tensor that must be an unchanged result of an op of this package.
void check_contiguous(ArgumentName name, const Tensor& tensor);

// Checks that every element lies in the storage, which the caller may have shrunk.
void check_storage(ArgumentName name, const Tensor& tensor);

// On the CPU, the address of the first element. On mps, its offset in a page-aligned buffer.
uint64_t first_byte(const Tensor& tensor);

// True if the position of every row in bytes is a multiple of `multiple`.
bool rows_aligned(const Tensor& tensor, int multiple);
bool rows_aligned_16(const Tensor& tensor);

// The position of the last element relative to the first one. The tensor must not be empty.
int64_t last_position(const Tensor& tensor);

// True if the tensor, or a dense tensor of its shape, extends past kMaxLength elements.
bool has_long_offsets(const Tensor& tensor);
bool has_long_offsets(const OptionalTensor& tensor);

}  // namespace metal_attn
