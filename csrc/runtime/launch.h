// One dispatch of a kernel as plain data. Ops build it and backends run it. It allocates nothing,
// and points to memory that the op owns.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <unordered_map>

#include "csrc/problem/tensor.h"
#include "csrc/runtime/fixed_vector.h"

namespace metal_attn {

// torch_mps_set_arg_bytes and Metal's setBytes both stop at 4 KiB.
inline constexpr std::size_t kMaxParamsBytes = 4096;

// The limit of Metal.
inline constexpr std::size_t kMaxBuffers = 31;

// flash_bwd_bias with every feature needs the most, 38.
inline constexpr std::size_t kMaxDefines = 48;

// `#define name value`. Names and words are never freed, like string literals.
struct Define {
  const char* name;
  const char* word;  // null: the value is the number
  int64_t number;

  Define() = default;
  Define(const char* name, const char* word) : name(name), word(word), number(0) {}
  template <std::integral Number>
  Define(const char* name, Number number)
      : name(name), word(nullptr), number(static_cast<int64_t>(number)) {}

  std::string value() const { return word != nullptr ? word : std::to_string(number); }
};

using Defines = FixedVector<Define, kMaxDefines>;

// The preprocessor treats an undefined feature as 0.
inline void define_if(bool on, Defines& defines, const char* name, int64_t value = 1) {
  if (on) { defines.push_back({name, value}); }
}

// A family's text with the defines of a specialisation.
struct Program {
  const char* family;  // shaders/<family>.metal
  Defines defines;
};

inline bool same_text(const char* a, const char* b) {
  return a == b || (a != nullptr && b != nullptr && std::strcmp(a, b) == 0);
}

struct SameProgram {
  bool operator()(const Program& a, const Program& b) const {
    return same_text(a.family, b.family) &&
           std::equal(a.defines.begin(), a.defines.end(), b.defines.begin(), b.defines.end(),
                      [](const Define& x, const Define& y) {
                        return x.number == y.number && same_text(x.name, y.name) &&
                               same_text(x.word, y.word);
                      });
  }
};

struct ProgramHash {
  std::size_t operator()(const Program& program) const {
    std::size_t hash = 0;
    for (const char* letter = program.family; *letter != '\0'; ++letter) {
      hash = hash * 31 + static_cast<std::size_t>(*letter);
    }
    for (const Define& define : program.defines) {
      // Only first letters, because hashing whole texts would take longer.
      const auto letter = static_cast<std::size_t>(define.word != nullptr ? define.word[0] : 0);
      hash = hash * 1099511628211u + static_cast<std::size_t>(define.number) * 256u + letter +
             static_cast<std::size_t>(define.name[0]) * 65536u;
    }
    return hash;
  }
};

// The compiled programs of a backend. Entries are never erased, so references stay valid.
template <typename Compiled>
using ProgramMap = std::unordered_map<Program, Compiled, ProgramHash, SameProgram>;

struct BufferArgument {
  uint32_t slot;  // [[buffer(slot)]]
  const Tensor* tensor;
  bool writable;

  BufferArgument() = default;
  BufferArgument(uint32_t slot, const Tensor& tensor, bool writable)
      : slot(slot), tensor(&tensor), writable(writable) {}
  BufferArgument(uint32_t slot, const Tensor&& tensor, bool writable) = delete;
};

using Buffers = FixedVector<BufferArgument, kMaxBuffers>;

// Adds an optional tensor, which must outlive the launch, as a read-only buffer.
inline void read_if(const OptionalTensor& tensor, Buffers& buffers, uint32_t slot) {
  if (tensor) { buffers.push_back({slot, *tensor, false}); }
}

// The bytes of a family's params structure.
class Params {
 public:
  template <typename Structure>
  void set(const Structure& params) {
    static_assert(std::is_trivially_copyable_v<Structure> && sizeof(Structure) <= kMaxParamsBytes);
    set(&params, sizeof(Structure));
  }
  // Appends a structure without padding: the sizes of structures must be multiples of 4.
  template <typename Structure>
  void append(const Structure& more) {
    static_assert(std::is_trivially_copyable_v<Structure> && alignof(Structure) <= 4 &&
                  sizeof(Structure) % 4 == 0);
    if (size_ + sizeof(Structure) > kMaxParamsBytes) {
      throw std::invalid_argument("metal_attn: " + std::to_string(sizeof(Structure)) +
                                  " bytes do not fit after " + std::to_string(size_) +
                                  " bytes of params");
    }
    std::memcpy(bytes_.data() + size_, &more, sizeof(Structure));
    size_ += sizeof(Structure);
  }
  // Throws std::invalid_argument above kMaxParamsBytes.
  void set(const void* bytes, std::size_t size) {
    if (size > kMaxParamsBytes) {
      throw std::invalid_argument("metal_attn: " + std::to_string(size) +
                                  " bytes of params; Metal allows at most " +
                                  std::to_string(kMaxParamsBytes));
    }
    std::memcpy(bytes_.data(), bytes, size);
    size_ = size;
  }

  const std::byte* data() const { return bytes_.data(); }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  std::size_t size_ = 0;
  std::array<std::byte, kMaxParamsBytes> bytes_;  // from size_ on uninitialised
};

inline constexpr int kSimdgroupThreads = 32;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The caller ensures that each number is below 2^32.
using Extent = std::array<uint32_t, 3>;
inline Extent extent(int64_t x, int64_t y = 1, int64_t z = 1) {
  return {static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z)};
}

struct Grid {
  Extent threadgroups{};
  Extent threads{};  // per threadgroup
};

// An upper bound of a launch's multiply-adds. 0 for kernels that read their operands once: they are
// short and are never divided into pieces.
struct Work {
  double threadgroup = 0;  // multiply-adds of a threadgroup
  double busy = 0;         // threadgroups that have work; 0: all
};

struct Launch {
  Launch() = default;
  Launch(const char* family, const char* kernel, const Defines& defines)
      : program{family, defines}, kernel(kernel) {}
  // For a kernel with the name of its family.
  Launch(const char* kernel, const Defines& defines) : Launch(kernel, kernel, defines) {}

  template <typename Structure>
  void set_params(uint32_t slot, const Structure& structure) {
    params_slot = slot;
    params.set(structure);
  }

  Program program;
  const char* kernel;
  Buffers buffers;
  uint32_t params_slot = 0;
  Params params;
  Extent threadgroups{};
  Extent threads{};  // per threadgroup
  Work work;
};

}  // namespace metal_attn
