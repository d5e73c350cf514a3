#include "csrc/tiles/flash_fwd.h"

#include "csrc/tiles/table.inc"

namespace metal_attn {
namespace {

constexpr DefaultRow<FlashFwdTile> kRows[] = {FLASH_FWD_ROWS(TILE_ROW)};
constexpr DefaultRow<FlashFwdTile> kTensorRows[] = {FLASH_FWD_TENSOR_ROWS(TILE_ROW)};

}  // namespace

std::span<const DefaultRow<FlashFwdTile>> FlashFwdSpecialisation::table() const {
  return tensor_tiles ? std::span<const DefaultRow<FlashFwdTile>>(kTensorRows) : kRows;
}

TileConditions FlashFwdSpecialisation::conditions(int family) const {
  // Wider values are cut into slices.
  TileConditions conditions = Tiled::conditions(family);
  conditions.columns = std::max(head_dim_qk, std::min(head_dim_v, knobs()[0].maximum));
  return conditions;
}

void FlashFwdSpecialisation::cut() {
  v_slice = slice_columns(head_dim_v, v_slices(), slice_unit());
  block_k = 8 * parts_within(features.kv_block(), 8, block_k / 8);
  simdgroups = column_simdgroups *
               parts_within(features.q_block(), 8 * row_fragments, simdgroups / column_simdgroups);
}

bool FlashFwdSpecialisation::can_run() const {
  if (v_slice != slice_columns(head_dim_v, v_slices(), slice_unit()) ||
      simdgroups % column_simdgroups != 0) {
    return false;
  }
  if (tensor_tiles) { return block_k == kTensorSpan && column_simdgroups == 1 && kv_staged; }
  if (kv_staged) {
    return fragments(head_dim_qk) % column_simdgroups == 0 && v_slice / 8 % column_simdgroups == 0;
  }
  // shaders/unstaged.h loads chunks of 16 bytes.
  const int chunk = 16 / element_bytes(kv_element());
  return column_simdgroups == 1 && q_in_registers && head_dim_qk % (8 * chunk) == 0 &&
         v_slice % kSpanColumns == 0;
}

int FlashFwdSpecialisation::threadgroup_bytes() const {
  if (tensor_tiles || !kv_staged) { return 0; }
  const int k_columns = padded(8 * fragments(head_dim_qk));
  const int v_columns = padded(v_slice);
  const bool shared = column_simdgroups > 1;  // V is staged where K was
  const int columns = shared ? std::max(k_columns, v_columns) : k_columns + v_columns;
  const int tiles = block_k * columns * element_bytes(kv_element());
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

}  // namespace metal_attn
