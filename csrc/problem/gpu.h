// The properties of the GPU that the choice of tiles depends on.
#pragma once

#include <cstdint>
#include <string>

namespace metal_attn {

// The first family with matrix units, which only tensor tiles use.
inline constexpr int kTensorFamily = 10;

// The SIMD groups that fit on a core of M1 or M2 if a thread has 128 registers.
inline constexpr int64_t kSimdgroupsPerCore = 12;

struct Gpu {
  int family;  // Apple's number: 7 is M1, 8 M2, 9 M3 and M4, 10 M5
  int cores;

  bool operator==(const Gpu&) const = default;
};

// The threadgroups that a core holds at once, at least 1. registers: 32-bit registers of a thread,
// or 0 if nobody has measured them. M1 and M2 reserve registers for each thread. Later GPUs
// allocate them while they run, so only the SIMD groups that a core can keep busy count.
int64_t threadgroups_per_core(const Gpu& gpu, int registers, int threads, int threadgroup_bytes);

// The family of a GPU by its name from torch.backends.mps.get_name, such as "Apple M3 Pro". An
// unknown name gives the oldest family, whose tiles run on every GPU.
int gpu_family(const std::string& name);

}  // namespace metal_attn
