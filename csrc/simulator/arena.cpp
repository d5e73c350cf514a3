#include "arena.h"

#include <algorithm>
#include <cstring>

namespace metal_attn::simulator {

void Arena::clear() {
  count_ = 0;
  variables_[last_ = 0] = {};  // an empty variable holds no address
  top_ = kRedZone;
  used_ = 0;
}

char* Arena::get(const char* name, uint64_t bytes, uint64_t alignment) {
  for (uint32_t i = 0; i < count_; ++i)
    if (variables_[i].name == name && variables_[i].bytes == bytes)
      return data_ + variables_[i].begin;
  if (alignment < 16) alignment = 16;
  uint64_t used = (used_ + alignment - 1) / alignment * alignment + bytes;
  uint64_t begin = (top_ + alignment - 1) / alignment * alignment;
  if (bytes > kLimit || used > kLimit || begin + bytes + kRedZone > kBytes ||
      count_ == kMaxVariables)
    return nullptr;
  variables_[count_++] = {name, static_cast<uint32_t>(begin), static_cast<uint32_t>(bytes)};
  used_ = static_cast<uint32_t>(used);
  top_ = static_cast<uint32_t>(begin + bytes + kRedZone);
  memset(data_ + begin, 0xFF, bytes);
  return data_ + begin;
}

const Variable* Arena::nearest(const char* address, uint32_t bytes) const {
  int64_t begin = address - data_, end = begin + bytes, smallest = INT64_MAX;
  const Variable* nearest_one = nullptr;
  for (uint32_t i = 0; i < count_; ++i) {
    const Variable& variable = variables_[i];
    int64_t above = begin - (int64_t{variable.begin} + variable.bytes);
    int64_t distance = std::max(above, variable.begin - end);
    if (distance < smallest) {
      smallest = distance;
      nearest_one = &variable;
    }
  }
  return nearest_one;
}

}  // namespace metal_attn::simulator
