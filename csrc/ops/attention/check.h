// One call of flash_fwd or flash_varlen_fwd, checked: what its launch needs to know.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "csrc/ops/attention/choose.h"
#include "csrc/ops/attention/flash_fwd.h"

namespace metal_attn {

struct FlashFwdCall {
  FlashFwdProblem problem;
  FlashFwdSpecialisation specialisation;
  int32_t batch;  // sequences
  int32_t heads;
  int32_t kv_heads;
  int32_t q_length;   // packed: at most, of any sequence
  int32_t kv_length;  // packed: at most, of any sequence
  int32_t q_total;    // packed: rows of q
  int32_t kv_total;   // of a cache: keys that a sequence may have
  double scale;
  std::array<uint32_t, 3> threadgroups;
  // The two that options.attn_mask may be.
  std::optional<torch::stable::Tensor> mask;
  std::optional<torch::stable::Tensor> bias;

  bool launches() const {
    return heads > 0 && (specialisation.features.varlen ? q_total > 0 : batch > 0 && q_length > 0);
  }
};

// Keys before and behind a query's position that it sees, or NO_WINDOW.
int64_t window_left(const FlashFwdOptions& options);
int64_t window_right(const FlashFwdOptions& options);

// Every check, then the choice of kernel. Throws std::invalid_argument.
FlashFwdCall analyse(const FlashFwdArguments& arguments);

}  // namespace metal_attn
