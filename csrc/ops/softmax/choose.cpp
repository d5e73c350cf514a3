#include "csrc/ops/softmax/choose.h"

#include <algorithm>

namespace metal_attn {
namespace {

// Rows of up to this many values are one SIMD group's: a barrier would cost more than it saves.
constexpr int64_t kShortRow = 1024;
// Those share threadgroups of this size, and somewhat longer rows have one each.
constexpr int kSimdgroups = 8;
// From here on a row has Metal's largest threadgroup, 1024 threads, each with 16 values or more.
constexpr int64_t kLongRow = 16384;
constexpr int kMaxSimdgroups = 32;

// Metal counts threads along each dimension of the grid in 32 bits, and at most 1024 are a group.
constexpr int64_t kMaxGroupsAcross = 4096;

}  // namespace

SoftmaxSpecialisation choose_softmax(const SoftmaxRows& rows) {
  if (rows.length <= kShortRow) {
    return {rows.element, 1, kSimdgroups, rows.wide_loads};
  }
  return {rows.element, rows.length < kLongRow ? kSimdgroups : kMaxSimdgroups, 1, rows.wide_loads};
}

std::array<uint32_t, 3> softmax_threadgroups(const SoftmaxRows& rows,
                                             const SoftmaxSpecialisation& s) {
  const int64_t groups = (rows.count + s.threadgroup_rows - 1) / s.threadgroup_rows;
  const int64_t across = std::min(groups, kMaxGroupsAcross);
  const int64_t down = across == 0 ? 0 : (groups + across - 1) / across;
  return {static_cast<uint32_t>(across), static_cast<uint32_t>(down), down == 0 ? 0u : 1u};
}

}  // namespace metal_attn
