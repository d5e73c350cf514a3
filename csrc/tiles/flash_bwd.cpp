#include "csrc/tiles/flash_bwd.h"

#include "csrc/tiles/shared.h"
#include "csrc/tiles/table.inc"

namespace metal_attn {
namespace {

constexpr DefaultRow<FlashBwdTile> kDqRows[] = {FLASH_BWD_DQ_ROWS(TILE_ROW)};
constexpr DefaultRow<FlashBwdTile> kDkvRows[] = {FLASH_BWD_DKV_ROWS(TILE_ROW)};
constexpr DefaultRow<FlashBwdTile> kScoreRows[] = {FLASH_BWD_BIAS_ROWS(TILE_ROW)};
constexpr DefaultRow<FlashBwdTile> kTensorDqRows[] = {FLASH_BWD_DQ_TENSOR_ROWS(TILE_ROW)};
constexpr DefaultRow<FlashBwdTile> kTensorDkvRows[] = {FLASH_BWD_DKV_TENSOR_ROWS(TILE_ROW)};

// The most columns of two separate float32 tiles of 8 rows that leave room for other arrays.
constexpr int kMaxSeparateColumns = 992;

// 16-byte chunks that a lane stores for its part of the fragments of a row.
int stored_chunks(int columns, int parts, Element element) {
  const int chunk_fragments = 8 / element_bytes(element);
  return (fragments(columns) / parts + chunk_fragments - 1) / chunk_fragments;
}

}  // namespace

int FlashBwdSpecialisation::slice_of(int columns) const {
  return slice_columns(columns, slices(), tensor_tiles ? kTensorSpan * column_simdgroups : 8);
}

FlashBwdSpecialisation::Kernel FlashBwdSpecialisation::named_rows() const {
  if (tensor_tiles) {
    return dkv() ? Kernel{"flash_bwd_dkv_tensor", kTensorDkvRows}
                 : Kernel{"flash_bwd_dq_tensor", kTensorDqRows};
  }
  return dkv()                      ? Kernel{"flash_bwd_dkv", kDkvRows}
         : gradient == Gradient::kQ ? Kernel{"flash_bwd_dq", kDqRows}
                                    : Kernel{"flash_bwd_bias", kScoreRows};
}

int FlashBwdSpecialisation::row_parts() const {
  return exchanges_weights() ? column_simdgroups / query_parts(block / 8, column_simdgroups) : 1;
}

bool FlashBwdSpecialisation::normalised() const {
  const bool float32_gradients = features.bias || features.alibi || features.sink;
  return exact_delta && (element == Element::kFloat || (!dkv() && float32_gradients));
}

int FlashBwdSpecialisation::threadgroup_bytes() const {
  const bool votes_exist = exact_delta && gradient == Gradient::kQ;
  const int votes = votes_exist ? ARRAY_BYTES(simdgroups * int(sizeof(float))) : 0;
  if (tensor_tiles) {
    // Partial sums of scores and of their gradients: 16 registers of each thread.
    return votes + (column_simdgroups > 1 ? 2 * threads() * 16 : 0) * int(sizeof(float));
  }
  const int qk_pairs = padded(8 * fragments(head_dim_qk));
  const int v_pairs = padded(8 * fragments(head_dim_v));
  const int pairs = tiles_shared() ? std::max(qk_pairs, v_pairs) : qk_pairs + v_pairs;
  // If SIMD groups of dk and dv share no rows, the rows of the other side are staged twice.
  const bool rows_staged = dkv() && column_simdgroups == 1;
  const int rows = rows_staged ? padded(qk_slice()) + padded(v_slice()) : 0;
  const int statistics = dkv()                           ? (normalised() ? 3 : 2) * block
                         : gradient == Gradient::kScores ? simdgroups * block  // sums of columns
                                                         : 0;
  // SIMD groups of dq that share rows store a part of the columns each.
  const int parts = dkv() ? 1 : column_simdgroups;
  const int chunks =
      stored_chunks(head_dim_qk, parts, element) + stored_chunks(head_dim_v, parts, element);
  const int stored = rows_in_threadgroup ? 32 * block_rows() / 8 * parts * chunks * 16 : 0;
  // Scores or weights, and their gradients. In dq each SIMD group has partial sums of both.
  const int scores = column_simdgroups > 1 ? 2 * block_rows() * block * parts : 0;
  return block * (pairs + rows) * element_bytes(element) + stored + votes +
         (statistics + scores) * int(sizeof(float));
}

bool FlashBwdSpecialisation::tiles_shared() const {
  const int columns = padded(8 * fragments(head_dim_qk)) + padded(8 * fragments(head_dim_v));
  return !tensor_tiles && element == Element::kFloat && column_simdgroups == 1 &&
         columns > kMaxSeparateColumns;
}

void FlashBwdSpecialisation::cut() {
  const int row_side = dkv() ? features.kv_block() : features.q_block();
  const int loop_side = dkv() ? features.q_block() : features.kv_block();
  slice = slice_of(widest());
  block = 8 * parts_within(loop_side, 8, block / 8);
  simdgroups =
      column_simdgroups * parts_within(row_side, 8 * row_fragments, simdgroups / column_simdgroups);
}

bool FlashBwdSpecialisation::can_run() const {
  const int parts = column_simdgroups;
  if (simdgroups % parts != 0) { return false; }
  if (tensor_tiles) {
    return block == kTensorSpan && row_fragments == 2 && parts <= 2 && !rows_in_threadgroup;
  }
  if ((rows_in_registers && rows_in_threadgroup) || qk_slice() % (8 * parts) != 0 ||
      v_slice() % (8 * parts) != 0) {
    return false;
  }
  if (exchanges_weights()) { return row_fragments % row_parts() == 0; }
  return row_fragments <= 2 && parts <= 2 && fragments(head_dim_qk) % parts == 0 &&
         fragments(head_dim_v) % parts == 0;
}

FlashBwdSpecialisation choose_flash_bwd(const FlashFwdProblem& problem, Gradient gradient,
                                        bool exact_delta, bool tensor_tiles, const Gpu& gpu) {
  auto s = specialisation_for<FlashBwdSpecialisation>(problem);
  s.tensor_tiles = tensor_tiles;
  s.wide_rotary = wide_rotary(problem);
  s.row_pairs = !tensor_tiles && s.wide_loads;
  s.gradient = gradient;
  s.exact_delta = exact_delta;
  return default_tile(s, gpu).value();
}

}  // namespace metal_attn
