#include "csrc/problem/gpu.h"

#include <array>
#include <cctype>

namespace metal_attn {
namespace {

constexpr int kOldestFamily = 7;
constexpr int kNewestFamily = 10;
// Of M1, M2 and so on.
constexpr std::array<int, 5> kFamilies{7, 8, 9, 9, 10};

// A thread of M1 and M2 has 128 registers. The back end that tiles are measured with allots 120.
constexpr int kFixedRegisters = 120;

// From M3 on registers are a part of the cache, so a larger tile costs cache and not occupancy. How
// large it may be is a judgement: nobody here could measure it.
constexpr int kCachedRegisters = 168;
constexpr int kFirstCachedFamily = 9;

}  // namespace

int gpu_family(const std::string& name) {
  const std::string prefix = "Apple M";
  if (name.rfind(prefix, 0) != 0) {
    return kOldestFamily;
  }
  std::size_t at = prefix.size();
  std::size_t generation = 0;
  while (at < name.size() && std::isdigit(static_cast<unsigned char>(name[at])) &&
         generation < 1000) {
    generation = 10 * generation + static_cast<std::size_t>(name[at++] - '0');
  }
  if (generation == 0 || (at < name.size() && name[at] != ' ')) {
    return kOldestFamily;
  }
  return generation <= kFamilies.size() ? kFamilies[generation - 1] : kNewestFamily;
}

int register_limit(const Gpu& gpu) {
  return gpu.family >= kFirstCachedFamily ? kCachedRegisters : kFixedRegisters;
}

}  // namespace metal_attn
