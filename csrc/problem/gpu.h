// The properties of the GPU on which the choice of tiles depends.
#pragma once

#include <cstdint>
#include <string>

namespace metal_attn {

// The first family with matrix units, which only tensor tiles reach.
inline constexpr int kTensorFamily = 10;

// That a core of M1 or M2 has room for, if a thread has 128 registers.
inline constexpr int64_t kSimdgroupsPerCore = 12;

struct Gpu {
  int family;  // Apple's: 7 is M1, 8 M2, 9 M3 and M4, 10 M5
  int cores;

  bool operator==(const Gpu&) const = default;
};

// By the name that torch.backends.mps.get_name gives: "Apple M3 Pro". The oldest if it is another
// name, or none: what fits there fits everywhere.
int gpu_family(const std::string& name);

}  // namespace metal_attn
