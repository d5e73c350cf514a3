// The pieces of a launch that would run for long: macOS ends a command buffer that takes seconds,
// and torch before 2.15 does not tell (docs/design/launch.md).
#pragma once

#include "csrc/runtime/launch.h"

extern "C" {

// Launches that may be divided are from now on in pieces of at most so many threadgroups; 0: by
// their work. For tests.
__attribute__((visibility("default"))) void metal_attn_limit_pieces(int64_t threadgroups);

}  // extern "C"

namespace metal_attn {

// The longest estimated time of one command buffer. Reports say that macOS allows 2 to 10 seconds.
inline constexpr double kCommandBufferSeconds = 1.0;

class Pieces {
 public:
  explicit Pieces(const Launch& launch);

  int64_t count() const { return counts_[0] * counts_[1] * counts_[2]; }
  // A cautious estimate of the time of a piece.
  double seconds() const { return seconds_; }

  // Only if there are several.
  Launch piece(const std::array<int64_t, 3>& number) const;

  // Calls `run` with the launch, or with a launch of each piece in turn.
  template <typename Run>
  void each(const Run& run) const {
    if (count() == 1) {
      run(launch_);
      return;
    }
    for (int64_t z = 0; z < counts_[2]; ++z) {
      for (int64_t y = 0; y < counts_[1]; ++y) {
        for (int64_t x = 0; x < counts_[0]; ++x) { run(piece({x, y, z})); }
      }
    }
  }

 private:
  const Launch& launch_;
  std::array<int64_t, 3> size_;    // threadgroups of a piece
  std::array<int64_t, 3> counts_;  // pieces
  double seconds_;
};

}  // namespace metal_attn
