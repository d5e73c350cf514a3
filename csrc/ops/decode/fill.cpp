#include "csrc/ops/decode/fill.h"

#include <cstdint>

#include "csrc/ops/attention/fill.h"
#include "csrc/ops/attention/flex.h"
#include "csrc/problem/strides.h"
#include "shaders/params.h"

namespace metal_attn {

using torch::stable::Tensor;

Launch flash_decode_launch(const FlashDecodeCall& call, const FlashFwdArguments& a,
                           const FlashDecodeAppend* append, const Tensor& out, const Tensor& lse) {
  const bool split = call.splits > 1;
  FlashDecodeParams params{};
  params.problem = flash_problem(call.forward, a);
  params.out_strides = row_strides(out);
  params.lse_strides = split ? row_strides(lse) : statistics_strides(lse);
  params.out_split_stride = split ? out.stride(3) : 0;
  params.lse_split_stride = split ? lse.stride(3) : 0;
  params.row_groups = static_cast<int32_t>(call.row_groups);
  Launch launch;
  launch.program.family = "flash_decode";
  launch.tile_row = call.specialisation.row;
  launch.kernel = "flash_decode";
  launch.program.defines = flash_decode_defines(call, append);
  launch.buffers = flash_inputs(call.forward, a);
  append_block_lists(launch.buffers, a, FlexWalk::kOverKeys);
  if (append != nullptr) {
    for (BufferArgument& buffer : launch.buffers) {
      buffer.writable = buffer.slot == FLASH_K || buffer.slot == FLASH_V ||
                        buffer.slot == FLASH_K_SCALE || buffer.slot == FLASH_V_SCALE;
    }
    launch.buffers.push_back({FLASH_DECODE_NEW_K, append->k, false});
    launch.buffers.push_back({FLASH_DECODE_NEW_V, append->v, false});
    params.append = append->params;
    params.q_advances = append->q_advances;
    params.problem.new_keys = append->params.length;
  }
  launch.buffers.push_back({FLASH_DECODE_OUT, out, true});
  launch.buffers.push_back({FLASH_DECODE_LSE, lse, true});
  launch.params_slot = FLASH_PARAMS;
  launch.params.set(params);
  launch.threadgroups = call.threadgroups;
  launch.threads = {static_cast<uint32_t>(call.specialisation.threads()), 1, 1};
  return launch;
}

}  // namespace metal_attn
