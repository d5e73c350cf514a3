#include "csrc/problem/gpu.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace metal_attn {
namespace {

constexpr int kOldestFamily = 7;
constexpr int kNewestFamily = 10;
// The families of M1, M2 and so on.
constexpr std::array<int, 5> kFamilies{7, 8, 9, 9, 10};

// The first family that allocates registers dynamically.
constexpr int kDynamicFamily = 9;

// The SIMD groups that keep the arithmetic of a core busy (metal-benchmarks).
constexpr int kBusySimdgroups = 24;

constexpr int kCoreThreadgroupMemory = 60 * 1024;  // as in bench/agx/lens.py

// The most 16-bit registers of a thread, and the threads that a core of M1 then holds (Mesa,
// src/asahi/compiler/agx_performance.c).
struct Occupancy {
  int halves;
  int threads;
};
constexpr std::array<Occupancy, 10> kOccupancies{{{104, 1024},
                                                  {112, 896},
                                                  {128, 832},
                                                  {136, 768},
                                                  {144, 704},
                                                  {160, 640},
                                                  {184, 576},
                                                  {208, 512},
                                                  {232, 448},
                                                  {256, 384}}};

int resident_threads(const Gpu& gpu, int registers) {
  if (gpu.family >= kDynamicFamily) { return 32 * kBusySimdgroups; }
  const auto row = std::find_if(kOccupancies.begin(), kOccupancies.end(), [&](const Occupancy& o) {
    return registers > 0 && 2 * registers <= o.halves;
  });
  return row == kOccupancies.end() ? kOccupancies.back().threads : row->threads;
}

}  // namespace

int64_t threadgroups_per_core(const Gpu& gpu, int registers, int threads, int threadgroup_bytes) {
  const int by_memory = kCoreThreadgroupMemory / std::max(threadgroup_bytes, 1);
  return std::max(std::min(resident_threads(gpu, registers) / threads, by_memory), 1);
}

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
