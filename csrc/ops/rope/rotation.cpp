#include "csrc/ops/rope/rotation.h"

#include <bit>

#include "csrc/ops/common/check.h"

namespace metal_attn {
namespace {

// The most heads for which a thread reuses cos and sin. With 8, a head costs an eighth of the loads
// of the tables. kMaxHeads and kManyThreads are estimated from facts about the hardware.
constexpr int64_t kMaxHeads = 8;

// The fewest threads of a grid whose threads process several heads. A GPU of 80 cores holds 61440
// threads at 24 SIMD groups per core.
constexpr double kManyThreads = 65536;

}  // namespace

int64_t aligned_vector(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) { return 1; }
  const uint64_t bytes = tensor.element_size();
  uint64_t steps = first_byte(tensor);
  for (int64_t dim = 0; dim < last; ++dim) {
    if (tensor.size(dim) > 1) { steps |= static_cast<uint64_t>(tensor.stride(dim)) * bytes; }
  }
  const int zeros = steps == 0 ? 63 : std::countr_zero(steps);
  return std::max<int64_t>((int64_t{1} << std::min(zeros, 16)) / static_cast<int64_t>(bytes), 1);
}

HeadShares share_heads(double threads, int32_t heads) {
  const int64_t most = std::clamp<int64_t>(static_cast<int64_t>(threads * heads / kManyThreads), 1,
                                           std::min<int64_t>(kMaxHeads, std::max(heads, 1)));
  // Groups have nearly the same size.
  const int64_t groups = divide_up(heads, most);
  return {static_cast<int>(divide_up(heads, std::max<int64_t>(groups, 1))),
          static_cast<int32_t>(groups)};
}

}  // namespace metal_attn
