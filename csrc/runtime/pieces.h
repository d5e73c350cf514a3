// Divides long launches into pieces: macOS ends a command buffer that takes seconds, and torch
// before 2.15 does not report it (docs/design/launch.md).
#pragma once

#include "csrc/runtime/launch.h"

extern "C" {

// For tests: sets the most threadgroups of a piece. 0: pieces follow from the work.
__attribute__((visibility("default"))) void metal_attn_limit_pieces(int64_t threadgroups);

}  // extern "C"

namespace metal_attn {

// The longest estimated time of one command buffer. macOS reportedly allows 2 to 10 seconds.
inline constexpr double kCommandBufferSeconds = 1.0;

class Pieces {
 public:
  explicit Pieces(const Launch& launch);

  int64_t count() const { return counts_[0] * counts_[1] * counts_[2]; }
  // An estimated upper bound of the time of a piece.
  double seconds() const { return seconds_; }

  // May be called only if there are several pieces.
  Launch piece(const std::array<int64_t, 3>& number) const;

  // Calls `run` with the launch of each piece, or with the undivided launch.
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
