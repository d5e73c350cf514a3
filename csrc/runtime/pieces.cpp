#include "csrc/runtime/pieces.h"

#include <atomic>
#include <cmath>

#include "csrc/runtime/callbacks.h"
#include "shaders/params/common.h"

namespace {

std::atomic<int64_t> g_limit{0};

}  // namespace

void metal_attn_limit_pieces(int64_t threadgroups) { g_limit = threadgroups; }

namespace metal_attn {
namespace {

// Multiply-adds of a core: a quarter of M1's peak (128 per cycle, 1.27 GHz). Later GPUs are faster.
constexpr double kProductsPerSecond = 40e9;

double seconds_of(const Work& work, int64_t threadgroups) {
  const auto all = static_cast<double>(threadgroups);
  const double busy = work.busy > 0 ? std::min(work.busy, all) : all;
  return std::ceil(busy / gpu().cores) * work.threadgroup / kProductsPerSecond;
}

// The most threadgroups of a command buffer.
int64_t most_threadgroups(const Launch& launch, int64_t all) {
  if (launch.work.threadgroup == 0) { return all; }
  if (const int64_t limit = g_limit; limit > 0) { return limit; }
  if (seconds_of(launch.work, all) <= kCommandBufferSeconds) { return all; }
  // Each core runs one threadgroup at a time. A threadgroup cannot be divided.
  const double each = launch.work.threadgroup / kProductsPerSecond;
  return std::max<int64_t>(static_cast<int64_t>(kCommandBufferSeconds / each), 1) * gpu().cores;
}

}  // namespace

// A piece has whole batches if a batch fits, otherwise whole heads if a head fits, otherwise tiles.
Pieces::Pieces(const Launch& launch) : launch_(launch), size_{1, 1, 1}, counts_{1, 1, 1} {
  std::array<int64_t, 3> grid;
  std::transform(launch.threadgroups.begin(), launch.threadgroups.end(), grid.begin(),
                 [](uint32_t extent) { return std::max<int64_t>(extent, 1); });
  int64_t room = most_threadgroups(launch, grid[0] * grid[1] * grid[2]);
  for (std::size_t i = 0; i < 3; ++i) {
    const int64_t length = grid[i];
    counts_[i] = divide_up(length, std::clamp<int64_t>(room, 1, length));
    size_[i] = divide_up(length, counts_[i]);
    counts_[i] = divide_up(length, size_[i]);
    room = counts_[i] == 1 ? room / length : 1;
  }
  seconds_ = seconds_of(launch.work, size_[0] * size_[1] * size_[2]);
}

Launch Pieces::piece(const std::array<int64_t, 3>& number) const {
  Launch launch = launch_;
  GridPiece place{};
  for (std::size_t i = 0; i < 3; ++i) {
    const int64_t first = number[i] * size_[i];
    place.first[i] = static_cast<uint32_t>(first);
    place.threadgroups[i] = launch_.threadgroups[i];
    launch.threadgroups[i] =
        static_cast<uint32_t>(std::min<int64_t>(size_[i], launch_.threadgroups[i] - first));
  }
  launch.program.defines.push_back({"GRID_PIECE", 1});
  launch.params.append(place);
  return launch;
}

}  // namespace metal_attn
