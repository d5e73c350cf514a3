#include "csrc/ops/attention/flash_fwd.h"

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/defines.h"
#include "csrc/ops/attention/fill.h"
#include "csrc/ops/attention/mask_blocks.h"
#include "csrc/ops/attention/tensor_tiles.h"
#include "csrc/ops/attention/tuning.h"
#include "csrc/ops/attention/work.h"
#include "csrc/ops/common/allocate.h"
#include "csrc/problem/strides.h"
#include "csrc/tiles/flash_fwd.h"

namespace metal_attn {
namespace {

FlashFwdSpecialisation choose(const FlashFwdCall& call, bool tensor_tiles) {
  return tuned(choose_flash_fwd(call.problem, tensor_tiles, gpu()), call.q_length, call.kv_length);
}

// The reason why this call cannot have tensor tiles, or null.
const char* why_no_tensor_tiles(const FlashFwdCall& call) {
  const char* why_not = no_tensor_tiles(call.problem);
  return why_not == nullptr && refused_tiles() != nullptr && choose(call, true).refused
             ? kTensorTilesRefused
             : why_not;
}

MaskTile mask_tile(const FlashFwdSpecialisation& s) {
  return {s.block_q(), s.block_k, FlexWalk::kOverKeys};
}

std::string describe_choice(const FlashFwdSpecialisation& s) {
  std::string text = (s.tensor_tiles ? "tensor tiles: " : "") + row_text(s.defaults);
  if (s.v_slices() > 1) {
    text += "; v has " + std::to_string(s.v_slices()) + " slices of " +
            Counted{s.v_slice, "column"}.str() + ", and the scores are computed for each slice";
  }
  if (!s.wide_loads) {
    const KvFormats& formats = s.features.cache.formats;
    const int bytes =
        std::max(kv_load_bytes(s.element, formats.k), kv_load_bytes(s.element, formats.v));
    text += "; k and v are loaded element by element, as some row is not " + std::to_string(bytes) +
            "-byte aligned or a head dim is not a multiple of 8";
  }
  const bool rotated = s.features.rotary && s.features.rotary->k;
  return text + (rotated && !s.wide_rotary ? "; k is rotated element by element" : "");
}

JsonObject note_of(const FlashFwdCall& call, const FlashFwdSpecialisation& s, const Tensor& q) {
  const std::string missing =
      missing_tensor_tiles(why_no_tensor_tiles(call), tensor_tiles_problem(q, Pass::kForward));
  return tile_note(s, call.q_length, call.kv_length)
      .add("reason", joined({describe_choice(s), describe_tf32(s.element, s.tensor_tiles), missing,
                             describe_mask_blocks(call, mask_tile(s))}));
}

Defines flash_fwd_defines(const FlashFwdSpecialisation& s) {
  Defines specific{
      {"V_SLICE", s.v_slice},       {"BLOCK_K", s.block_k},
      {"SIMDGROUPS", s.simdgroups}, {"Q_IN_REGISTERS", s.q_in_registers},
      {"ROW_PAIRS", s.row_pairs},
  };
  define_if(s.column_simdgroups > 1, specific, "COLUMN_SIMDGROUPS", s.column_simdgroups);
  define_if(!s.kv_staged, specific, "KV_STAGED", 0);
  return all_defines(s, specific);
}

std::tuple<Tensor, Tensor> run(const FlashFwdCall& call, const FlashFwdArguments& a,
                               Backend& backend, bool tensor_tiles) {
  FlashFwdSpecialisation s = choose(call, tensor_tiles && why_no_tensor_tiles(call) == nullptr);
  s.features.mask_blocks = skips_mask_blocks(call);
  const Extent threadgroups =
      check_grid(call, {"q", call.q_length, call.heads, s.v_slices()},
                 {s.block_q(), s.features.q_block(), s.features.ordered(), s.threads()});
  Tensor out = new_out(a, s.head_dim_v);
  Tensor lse = new_lse(a);
  if (call.launches()) {
    Launch launch(s.kernel(), flash_fwd_defines(s));
    launch.buffers = flash_inputs(call, a);
    append_block_lists(launch.buffers, a, FlexWalk::kOverKeys);
    FlashParams problem = flash_problem(call, a);
    const auto lists = list_mask_blocks(call, s.features, mask_tile(s), backend);
    bind_mask_blocks(lists, launch.buffers, problem);
    launch.buffers.push_back({FLASH_FWD_OUT, out, true});
    launch.buffers.push_back({FLASH_FWD_LSE, lse, true});
    launch.set_params(FLASH_PARAMS,
                      FlashFwdParams{problem, row_strides(out), statistics_strides(lse)});
    launch.threadgroups = threadgroups;
    launch.threads = extent(s.threads());
    launch.work = {double(s.block_q()) * double(keys_seen(a, call, s.block_q())) *
                       pair_work(s.features, s.head_dim_qk + s.v_slice),
                   busy_threadgroups(call, call.q_total, s.block_q(), threadgroups[1])};
    append_block_order(launch, a, FlexWalk::kOverKeys);
    note(backend, [&] { return note_of(call, s, a.q); });
    run_chosen(backend, launch, s, call.q_length, call.kv_length);
  }
  return {out, lse};
}

}  // namespace

Tensor new_out(const FlashFwdArguments& a, int64_t head_dim_v) {
  Dims sizes = sizes_of(a.q);
  sizes.back() = head_dim_v;
  return new_empty_strided(a.q, sizes, strides_like(a.q, sizes), dtype_of(a.q));
}

Tensor new_lse(const FlashFwdArguments& a) {
  return new_empty(a.q, lse_sizes(a.q), ScalarType::Float);
}

std::tuple<Tensor, Tensor> flash_fwd(const FlashFwdArguments& a, Backend& backend,
                                     bool tensor_tiles) {
  const FlashFwdCall call = check_flash_fwd(a);
  return with_tiles_that_run([&] { return run(call, a, backend, tensor_tiles); });
}

std::tuple<Tensor, Tensor> flash_fwd(const FlashFwdCall& call, const FlashFwdArguments& a,
                                     Backend& backend) {
  return with_tensor_tiles(
      a.q, backend, Pass::kForward,
      a.flex ? "flex_attention with this score_mod and mask_mod" : "attention of such tensors",
      [&](bool tensor_tiles) {
        return with_tiles_that_run([&] { return run(call, a, backend, tensor_tiles); });
      });
}

}  // namespace metal_attn
