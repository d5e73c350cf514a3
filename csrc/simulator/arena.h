// The threadgroup memory of one threadgroup.
#pragma once

#include <cstdint>

namespace metal_attn::simulator {

struct Variable {
  const char* name;
  uint32_t begin;  // offset in the arena
  uint32_t bytes;
};

class Arena {
 public:
  static constexpr uint32_t kLimit = 32768;  // bytes of a threadgroup on Apple GPUs
  static constexpr uint32_t kMaxVariables = 128;
  static constexpr uint32_t kRedZone = 256;  // unused bytes between variables
  static constexpr uint32_t kBytes = kLimit + (kMaxVariables + 1) * 2 * kRedZone;

  void init(char* data) { data_ = data; }
  char* data() const { return data_; }
  bool contains(const char* address) const { return address >= data_ && address < data_ + kBytes; }

  void clear();  // removes all variables
  // The variable's memory, which the first call fills with NaN. Null if the limit is exceeded.
  char* get(const char* name, uint64_t bytes, uint64_t alignment);
  // The variable that holds [address, address + bytes), or null.
  const Variable* find(const char* address, uint32_t bytes) {
    uint64_t offset = static_cast<uint64_t>(address - data_);
    if (holds(variables_[last_], offset, bytes)) return &variables_[last_];
    for (uint32_t i = 0; i < count_; ++i)
      if (holds(variables_[i], offset, bytes)) return &variables_[last_ = i];
    return nullptr;
  }
  // The variable nearest to [address, address + bytes), or null.
  const Variable* nearest(const char* address, uint32_t bytes) const;
  uint32_t used() const { return used_; }  // bytes, without red zones

 private:
  static bool holds(const Variable& variable, uint64_t offset, uint32_t bytes) {
    return offset >= variable.begin && offset + bytes <= variable.begin + variable.bytes;
  }

  char* data_;
  uint32_t count_ = 0;
  uint32_t last_ = 0;  // index of the variable that `find` returned last
  uint32_t top_ = kRedZone;
  uint32_t used_ = 0;
  Variable variables_[kMaxVariables] = {};
};

}  // namespace metal_attn::simulator
