#include "csrc/tiles/flash_fwd.h"

#include <algorithm>

#include "csrc/tiles/shared.h"
#include "csrc/tiles/table.inc"
#include "csrc/tiles/tensor.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

constexpr DefaultRow<FlashFwdTile> kRows[] = {FLASH_FWD_ROWS(TILE_ROW)};
constexpr DefaultRow<FlashFwdTile> kRowsOfTensorTiles[] = {FLASH_FWD_TENSOR_ROWS(TILE_ROW)};

// Whether two SIMD groups can share rows, with as many columns each.
bool divides(const FlashFwdSpecialisation& s) {
  const int parts = s.column_simdgroups;
  return s.simdgroups % parts == 0 && fragments(s.head_dim_qk) % parts == 0 &&
         s.v_slice / 8 % parts == 0;
}

// Whether SIMD groups can read K and V themselves, in chunks of 16 bytes (shaders/unstaged.h).
bool reads_unstaged(const FlashFwdSpecialisation& s) {
  const int chunk = 16 / element_bytes(kv_element(s));
  return s.column_simdgroups == 1 && s.q_in_registers && s.head_dim_qk % (8 * chunk) == 0 &&
         s.v_slice % kSpanColumns == 0;
}

}  // namespace

std::span<const DefaultRow<FlashFwdTile>> FlashFwdSpecialisation::table() const {
  if (tensor_tiles) {
    return kRowsOfTensorTiles;
  }
  return kRows;
}

TileQuestion FlashFwdSpecialisation::question(int family) const {
  // Wider values are cut into slices.
  TileQuestion question = Tiled::question(family);
  question.columns = std::max(head_dim_qk, std::min(head_dim_v, knobs()[0].most));
  return question;
}

bool FlashFwdSpecialisation::take(const FlashFwdTile& tile) {
  Tiled::tile() = tile;
  v_slice = slice_columns(head_dim_v, v_slices(), tensor_tiles ? kTensorSpan : 8);
  block_k = 8 * parts_within(features.kv_block(), 8, block_k / 8);
  simdgroups = column_simdgroups *
               parts_within(features.q_block(), 8 * row_fragments, simdgroups / column_simdgroups);
  return can_run();
}

bool FlashFwdSpecialisation::can_run() const {
  if (!within_limits(*this) || !within_blocks(features, block_q(), block_k)) {
    return false;
  }
  if (tensor_tiles) {
    return v_slice % kTensorSpan == 0 && block_k == kTensorSpan && column_simdgroups == 1 &&
           kv_staged;
  }
  return v_slice == slice_columns(head_dim_v, v_slices(), 8) && divides(*this) &&
         (kv_staged || reads_unstaged(*this)) && threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES;
}

int FlashFwdSpecialisation::threadgroup_bytes() const {
  if (tensor_tiles || !kv_staged) {
    return 0;
  }
  const int k_columns = padded(8 * fragments(head_dim_qk));
  const int v_columns = padded(v_slice);
  const bool shared = column_simdgroups > 1;  // V is staged where K was
  const int columns = shared ? std::max(k_columns, v_columns) : k_columns + v_columns;
  const int tiles = block_k * columns * element_bytes(kv_element(*this));
  return tiles + (shared ? threads() * block_k / 8 * 2 * int(sizeof(float)) : 0);
}

FlashFwdSpecialisation choose_flash_fwd(const FlashFwdProblem& problem, bool tensor_tiles,
                                        const Gpu& gpu) {
  auto s = specialisation_for<FlashFwdSpecialisation>(problem);
  s.tensor_tiles = tensor_tiles;
  s.row_fragments = tensor_tiles ? 2 : 1;
  s.wide_loads = s.wide_loads && (!tensor_tiles || problem.q_aligned);
  s.wide_rotary = s.wide_loads && wide_rotary(problem);
  s.row_pairs = !tensor_tiles && problem.q_pairs;
  return default_tile(s, gpu).value();
}

Defines flash_fwd_defines(const FlashFwdSpecialisation& s) {
  Defines own{
      {"V_SLICE", s.v_slice},       {"BLOCK_K", s.block_k},
      {"SIMDGROUPS", s.simdgroups}, {"Q_IN_REGISTERS", s.q_in_registers},
      {"ROW_PAIRS", s.row_pairs},
  };
  define_if(s.column_simdgroups > 1, own, "COLUMN_SIMDGROUPS", s.column_simdgroups);
  define_if(!s.kv_staged, own, "KV_STAGED", 0);
  return all_defines(s, own);
}

std::string describe_choice(const FlashFwdSpecialisation& s) {
  const std::string staged = s.tensor_tiles || !s.kv_staged
                                 ? " straight from memory; "
                                 : ": " + std::to_string(s.threadgroup_bytes()) + " of " +
                                       std::to_string(THREADGROUP_MEMORY_BYTES) +
                                       " bytes of threadgroup memory; ";
  std::string slices;
  if (s.v_slices() > 1) {
    slices = "v in " + std::to_string(s.v_slices()) + " slices of " + std::to_string(s.v_slice) +
             " columns, each with the scores computed again; ";
  }
  const KvFormats& formats = s.features.cache.formats;
  std::string bytes = std::to_string(kv_load_bytes(s.element, formats.k));
  std::string loads = bytes + "-byte loads of k and v";
  if (formats.v != formats.k) {
    bytes += "- or " + std::to_string(kv_load_bytes(s.element, formats.v));
    loads = bytes + "-byte loads of k or v";
  }
  if (!s.wide_loads) {
    loads = "element-wise loads of k and v, as some row is not " + bytes +
            "-byte aligned or a head dim is no multiple of 8";
  }
  if (s.features.rotary && s.features.rotary->k && !s.wide_rotary) {
    loads += "; k rotated element by element";
  }
  const char* q = s.q_in_registers ? "in registers" : "read again for every block";
  const std::string rows =
      std::to_string(8 * s.row_fragments) + " queries " +
      (s.column_simdgroups > 1 ? "two SIMD groups, half the columns each," : "a SIMD group");
  return (s.tensor_tiles ? "tensor tiles: " : "") + rows + " and Q " + q + ": " +
         row_text(s.defaults) + "; " + std::to_string(s.block_k) + " keys a block" + staged +
         slices + loads;
}

}  // namespace metal_attn
