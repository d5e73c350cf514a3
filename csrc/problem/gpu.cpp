#include "csrc/problem/gpu.h"

#include <array>
#include <cctype>

namespace metal_attn {
namespace {

constexpr int kOldestFamily = 7;
constexpr int kNewestFamily = 10;
// The families of M1, M2 and so on.
constexpr std::array<int, 5> kFamilies{7, 8, 9, 9, 10};

}  // namespace

int gpu_family(const std::string& name) {
  const std::string prefix = "Apple M";
  if (name.rfind(prefix, 0) != 0) { return kOldestFamily; }
  std::size_t at = prefix.size();
  std::size_t generation = 0;
  while (at < name.size() && std::isdigit(static_cast<unsigned char>(name[at])) &&
         generation < 1000) {
    generation = 10 * generation + static_cast<std::size_t>(name[at++] - '0');
  }
  if (generation == 0 || (at < name.size() && name[at] != ' ')) { return kOldestFamily; }
  return generation <= kFamilies.size() ? kFamilies[generation - 1] : kNewestFamily;
}

}  // namespace metal_attn
