// Argument checks shared by the ops. Each throws std::invalid_argument, which Python sees as
// ValueError (torch_metal_attn/runtime/refusals.py sees to that from torch 2.15), and names the
// argument, what was given and what is allowed.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string>

#include "csrc/problem/element.h"
#include "csrc/problem/tensor.h"

extern "C" {

// This thread's last refusal with its marks (see refuse) if `text` is its text; else null.
__attribute__((visibility("default"))) const char* metal_attn_refusal(const char* text);
// Lets tensors on meta pass for ones on any device in this thread: `explain` of a backward has no
// results of a forward. Launches may then only be recorded.
__attribute__((visibility("default"))) void metal_attn_let_meta_pass(int32_t pass);

}  // extern "C"

namespace metal_attn {

// Throws std::invalid_argument with the text without its backquotes. They mark arguments' names,
// and shapes and layouts of the op's arguments: functions that call an argument otherwise, or have
// its dimensions in another order, replace what is marked (torch_metal_attn/ops/names.py).
[[noreturn]] void refuse(const std::string& marked);

// An argument's name in a message.
class ArgumentName {
 public:
  constexpr ArgumentName(const char* name) : name_(name) {}

  friend std::ostream& operator<<(std::ostream& stream, const ArgumentName& argument) {
    return stream << '`' << argument.name_ << '`';
  }

 private:
  const char* name_;
};

// Shaders count positions in 32 bits, and step past the end by less than a block.
inline constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max() - 1023;

// Columns of values, and so of attention's results.
inline constexpr int kMaxHeadDimV = 512;

// A tensor's description, written only if there is a message: checks that pass cost next
// to nothing.
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

// A number with its noun, as a message shows it: "1 head", "2 heads", "3 queries", "2 passes".
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

// Checks that the tensor is not None, is on mps, the CPU or meta (for fake kernels), and is
// strided.
void check_device(ArgumentName name, const Tensor& tensor);
// The same, and on the other's device.
void check_same_device(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                       const Tensor& other);

inline constexpr char kElementNames[] = "float32, float16 or bfloat16";

// The same as tensor.scalar_type(), which asks torch for the number of one dtype after the other.
ScalarType dtype_of(const Tensor& tensor);

// Metal's name of what kernels index in the tensor; null for dtypes that they cannot.
const char* metal_element(const Tensor& tensor);

// One of the dtypes; returns which.
ScalarType check_dtype(ArgumentName name, const Tensor& tensor,
                       std::initializer_list<ScalarType> allowed);

// Call it before scalar_type(), which throws for some dtypes. `allowed` is for the message.
void check_known_dtype(ArgumentName name, const Tensor& tensor, const char* allowed);

// float32, float16 or bfloat16.
Element check_element(ArgumentName name, const Tensor& tensor);
Element check_element(ArgumentName name, ScalarType dtype);
void check_same_dtype(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                      const Tensor& other);

// Sizes of two arguments; `what` they are, with its article: "a batch".
void check_equal(ArgumentName name, int64_t size, ArgumentName other_name, int64_t other,
                 const char* what);

// `layout` describes the dimensions in the message: "(batch, heads, length, head_dim)".
void check_rank(ArgumentName name, const Tensor& tensor, int64_t rank, const char* layout);

// tensor.size(dim) as int32, in 0..2^31-1.
int32_t check_length(ArgumentName name, const Tensor& tensor, int64_t dim, const char* what);

int check_head_dim(ArgumentName name, int64_t head_dim, int max);

void check_shape(ArgumentName name, const Tensor& tensor,
                 std::initializer_list<IntHeaderOnlyArrayRef> allowed);

// 1 to 4 dimensions that broadcast to `shape`.
void check_broadcasts(ArgumentName name, const Tensor& tensor, const std::array<int64_t, 4>& shape);

// True if the tensor has no data: fake kernels are checked on such.
bool is_meta(const Tensor& tensor);

// The numbers of an int32 tensor if they are at hand: those on mps are checked by the kernel.
const int32_t* values_on_cpu(const Tensor& tensor);

// int32, contiguous, of one dimension, on `other`'s device.
void check_index(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                 const Tensor& other);

// The first row of each packed sequence, and the end of the last: on q's device, not empty.
void check_ends(ArgumentName name, const Tensor& cu_seqlens, const Tensor& q);

// Every sequence's length is in 0..longest, where the host can read it.
void check_steps(ArgumentName name, const Tensor& cu_seqlens, int64_t longest,
                 ArgumentName longest_name);

// The same, and they begin at 0 and end within so many rows.
void check_cu_seqlens(ArgumentName name, const Tensor& cu_seqlens, int64_t total, int64_t longest,
                      ArgumentName longest_name);

// float32 of this shape on `other`'s device: a number a row, as softmax_lse is.
void check_statistics(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                      const Tensor& other, IntHeaderOnlyArrayRef shape);

// One of the dtypes and one of the shapes, on `other`'s device, with rows whose last stride is 1.
ScalarType check_operand(ArgumentName name, const Tensor& tensor, ArgumentName other_name,
                         const Tensor& other, std::initializer_list<ScalarType> dtypes,
                         std::initializer_list<IntHeaderOnlyArrayRef> shapes);

// learnable_sink, a number a query head.
Element check_sink(const Tensor& sink, int64_t heads, ArgumentName other_name, const Tensor& other);

// The last stride is 1, and check_storage.
void check_rows(ArgumentName name, const Tensor& tensor);

// For a tensor that an op of this package returned.
void check_contiguous(ArgumentName name, const Tensor& tensor);

// Every element lies in the storage, which a caller may have shrunk under the tensor.
void check_storage(ArgumentName name, const Tensor& tensor);

// The place of the first element: a Metal buffer begins at a page, a CPU storage anywhere.
uint64_t first_byte(const Tensor& tensor);

// True if the tensor's first element and all its rows begin at a multiple of so many bytes.
bool rows_aligned(const Tensor& tensor, int multiple);
bool rows_aligned_16(const Tensor& tensor);

// The position of the last element of a tensor that has some, counted from its first.
int64_t last_position(const Tensor& tensor);

// True if the tensor, or a dense one of its shape, ends past 2^31 elements.
bool has_long_offsets(const Tensor& tensor);
bool has_long_offsets(const OptionalTensor& tensor);

}  // namespace metal_attn
