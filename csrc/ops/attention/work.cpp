#include "csrc/ops/attention/work.h"

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/fill.h"
#include "csrc/ops/attention/flex.h"
#include "csrc/tiles/table.h"

namespace metal_attn {
namespace {

// The most rows of the other side, up to `length`, that `rows` rows see by window and chunk.
// Window sizes may be near 2^63.
int64_t in_window(const FlashFwdOptions& o, int64_t length, int64_t rows) {
  const int64_t right = o.causal ? 0 : o.window_size_right;
  if (o.window_size_left >= 0 && right >= 0) {
    length =
        std::min(length, std::min(o.window_size_left, length) + std::min(right, length) + rows);
  }
  return o.attention_chunk > 0 ? std::min(length, o.attention_chunk + rows) : length;
}

}  // namespace

Extent check_grid(const FlashFwdCall& call, const GridRows& rows, const GridTiles& tiles) {
  const FlashFwdProblem& p = call.problem;
  const int64_t blocks = tiles_of(rows.length, tiles.rows, tiles.listed_rows, tiles.ordered);
  // Positions in the grid are 32-bit, counted in threads.
  const int64_t max_blocks = std::numeric_limits<uint32_t>::max() / tiles.threads;
  check(blocks <= max_blocks, ArgumentName(rows.name), " has a length of ", rows.length,
        "; with head dims ", p.head_dim_qk, " and ", p.head_dim_v, " it must be at most ",
        max_blocks * tiles.rows);
  check(rows.heads <= kMaxLength / rows.parts, ArgumentName(rows.name), " has ", rows.heads,
        " heads; with head dims ", p.head_dim_qk, " and ", p.head_dim_v, " it must be at most ",
        kMaxLength / rows.parts);
  // Packed: one more row of the grid writes rows that belong to no sequence.
  const int64_t sequences = int64_t{call.batch} + (p.features.varlen ? 1 : 0);
  return extent(std::max<int64_t>(blocks, 1), rows.heads * rows.parts, sequences);
}

int64_t keys_seen(const FlashFwdArguments& a, const FlashFwdCall& call, int64_t queries) {
  const FlashFwdOptions& o = a.options;
  int64_t keys = call.kv_length;
  if (a.flex && a.flex->kv_num_blocks) {
    keys = std::min(keys, listed_rows(*a.flex, FlexWalk::kOverKeys));
  }
  if (o.q_offset && window_right(o) != NO_WINDOW) {
    keys = std::clamp<int64_t>(*o.q_offset + call.q_length + window_right(o), 0, keys);
  }
  return in_window(o, keys, queries);
}

int64_t queries_seeing(const FlashFwdArguments& a, const FlashFwdCall& call, int64_t keys) {
  int64_t queries = call.q_length;
  if (a.flex && a.flex->q_num_blocks) {
    queries = std::min(queries, listed_rows(*a.flex, FlexWalk::kOverQueries));
  }
  return in_window(a.options, queries, keys);
}

double pair_work(const FlashFwdFeatures& features, int columns) {
  // Estimated instructions of the softmax, and of functions, random numbers and masks.
  return columns + (register_pressure_of(features) == RegisterPressure::kLight ? 64 : 256);
}

double busy_threadgroups(const FlashFwdCall& call, int64_t total, int block, int64_t columns) {
  const bool packed = call.problem.features.varlen;
  return packed ? double(columns) * double(divide_up(total, block) + call.batch + 1) : 0;
}

}  // namespace metal_attn
