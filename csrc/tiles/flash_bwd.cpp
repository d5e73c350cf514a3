#include "csrc/tiles/flash_bwd.h"

#include <algorithm>
#include <cmath>

#include "csrc/tiles/shared.h"
#include "csrc/tiles/table.inc"
#include "csrc/tiles/tensor.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

constexpr DefaultRow<FlashBwdTile> kDqRows[] = {FLASH_BWD_DQ_ROWS(TILE_ROW)};
constexpr DefaultRow<FlashBwdTile> kDkvRows[] = {FLASH_BWD_DKV_ROWS(TILE_ROW)};
constexpr DefaultRow<FlashBwdTile> kScoreRows[] = {FLASH_BWD_BIAS_ROWS(TILE_ROW)};
constexpr DefaultRow<FlashBwdTile> kTensorDqRows[] = {FLASH_BWD_DQ_TENSOR_ROWS(TILE_ROW)};
constexpr DefaultRow<FlashBwdTile> kTensorDkvRows[] = {FLASH_BWD_DKV_TENSOR_ROWS(TILE_ROW)};

// Whether rows of the other side are staged as they are, beside pairs.
bool stages_rows(const FlashBwdSpecialisation& s) { return s.dkv() && s.column_simdgroups == 1; }

}  // namespace

int FlashBwdSpecialisation::slice(int columns) const {
  const int shared = column_simdgroups;
  return tensor_tiles ? shared * slice_columns(columns, slices * shared, kTensorSpan)
                      : slice_columns(columns, slices, 8);
}

const char* FlashBwdSpecialisation::kernel() const {
  if (tensor_tiles) {
    return dkv() ? "flash_bwd_dkv_tensor" : "flash_bwd_dq_tensor";
  }
  return dkv() ? "flash_bwd_dkv" : of == Gradient::kQ ? "flash_bwd_dq" : "flash_bwd_bias";
}

bool FlashBwdSpecialisation::exchanges_weights() const {
  return dkv() && column_simdgroups > 1 && !tensor_tiles;
}

int FlashBwdSpecialisation::row_parts() const {
  return exchanges_weights() ? column_simdgroups / query_parts(block / 8, column_simdgroups) : 1;
}

bool FlashBwdSpecialisation::normalised() const {
  const bool others = features.bias || features.alibi || features.sink;
  return exact_delta && (element == Element::kFloat || (!dkv() && others));
}

int FlashBwdSpecialisation::threadgroup_bytes() const {
  if (tensor_tiles) {
    // Votes, and parts of scores and of their gradients: 16 registers of each thread.
    const int votes = exact_delta && !dkv() ? simdgroups : 0;
    return (votes + (column_simdgroups > 1 ? 2 * threads() * 16 : 0)) * int(sizeof(float));
  }
  const int pairs = pair_columns(*this);
  const int rows = stages_rows(*this) ? padded(qk_slice()) + padded(v_slice()) : 0;
  const int row_statistics = normalised() ? 3 : 2;
  const int statistics = dkv()                     ? row_statistics * block
                         : of == Gradient::kScores ? simdgroups * block  // sums of columns
                         : exact_delta             ? simdgroups
                                                   : 0;
  // dq's SIMD groups that share rows keep a part of their columns each.
  const int column_parts = dkv() ? 1 : column_simdgroups;
  const int chunks = kept_chunks(fragments(head_dim_qk) / column_parts, element) +
                     kept_chunks(fragments(head_dim_v) / column_parts, element);
  const int kept = rows_in_threadgroup ? 32 * block_rows() / 8 * column_parts * chunks * 16 : 0;
  // Of scores or weights and of their gradients; dq's are parts of each.
  const int scores = block_rows() * block * (dkv() ? 1 : column_simdgroups);
  const int parts = column_simdgroups > 1 ? 2 * scores * int(sizeof(float)) : 0;
  return block * (pairs + rows) * element_bytes(element) + statistics * int(sizeof(float)) + kept +
         parts;
}

namespace {

// How much longer a grid of so many SIMD groups takes because it leaves cores idle. banded: some
// tiles are shorter, which only later tiles make up for. 0: of a problem too small to matter.
double idle_factor(double simdgroups, bool banded, const Gpu& gpu) {
  if (simdgroups == 0.0) {
    return 1.0;
  }
  // Two thirds of the SIMD groups still do more than two thirds of the work (replay.md).
  constexpr double kExponent = 0.85;
  const double waves = simdgroups / double(kSimdgroupsPerCore * gpu.cores);
  const double uneven = banded ? 1.0 + std::max(2.0 - waves, 0.0) / 2 : 1.0;
  return uneven / std::pow(std::min(waves, 1.0), kExponent);
}

// What a grid of dk and dv with so many splits of a KV head's query heads takes longer than the
// products alone.
double grid_factor(const FlashBwdSpecialisation& s, int splits, const FlashFwdProblem& problem,
                   const Gpu& gpu) {
  const double tiles = double(problem.keys) / s.block_rows();
  const double idle = idle_factor(tiles * s.slices * s.simdgroups * splits, s.features.band, gpu);
  if (splits == 1) {
    return idle;
  }
  // To write and add up a key's part takes as long as this many queries. By judgement: memory of
  // 68 GB/s beside 2.6 TFLOPS, as M1 has, and of 269 beside 32 of matrix units, as M5 Pro has.
  const double part_queries = s.tensor_tiles ? 250 : 80;
  const double queries = double(problem.q_length) * problem.queries_per_kv;
  return idle * (1.0 + part_queries * splits / queries);
}

// Whether the columns and the scores can be divided among the SIMD groups that share rows.
bool divides(const FlashBwdSpecialisation& s) {
  const int parts = s.column_simdgroups;
  if (parts == 1) {
    return s.row_fragments <= 2;
  }
  const int own = 8 * parts;
  if (parts == 3 || s.simdgroups % parts != 0 || s.qk_slice() % own != 0 ||
      s.v_slice() % own != 0) {
    return false;
  }
  if (s.exchanges_weights()) {
    return s.row_fragments % s.row_parts() == 0;
  }
  return parts == 2 && s.row_fragments <= 2 && fragments(s.head_dim_qk) % 2 == 0 &&
         fragments(s.head_dim_v) % 2 == 0;
}

// Slices of the tile that have columns: of dq, or of the wider of dk and dv. The grid has no
// others, as a slice of dq without columns would be taken for the next head.
int used_slices(const FlashBwdSpecialisation& s) {
  const int columns = s.dkv() ? std::max(s.head_dim_qk, s.head_dim_v) : s.head_dim_qk;
  return (columns + s.slice(columns) - 1) / s.slice(columns);
}

}  // namespace

std::span<const DefaultRow<FlashBwdTile>> FlashBwdSpecialisation::table() const {
  using Rows = std::span<const DefaultRow<FlashBwdTile>>;
  if (tensor_tiles) {
    return dkv() ? Rows(kTensorDkvRows) : Rows(kTensorDqRows);
  }
  return dkv() ? Rows(kDkvRows) : of == Gradient::kQ ? Rows(kDqRows) : Rows(kScoreRows);
}

bool FlashBwdSpecialisation::take(const FlashBwdTile& tile) {
  Tiled::tile() = tile;
  const int own_side = dkv() ? features.kv_block() : features.q_block();
  const int other_side = dkv() ? features.q_block() : features.kv_block();
  slices = used_slices(*this);
  block = 8 * parts_within(other_side, 8, block / 8);
  simdgroups =
      column_simdgroups * parts_within(own_side, 8 * row_fragments, simdgroups / column_simdgroups);
  return can_run();
}

bool FlashBwdSpecialisation::can_run() const {
  const int queries = dkv() ? block : block_rows();
  const int keys = dkv() ? block_rows() : block;
  if (!within_limits(*this) || slices > used_slices(*this) ||
      !within_blocks(features, queries, keys)) {
    return false;
  }
  if (tensor_tiles) {
    return block == kTensorSpan && row_fragments == 2 && column_simdgroups <= 2 &&
           simdgroups % column_simdgroups == 0 && !rows_in_threadgroup;
  }
  return row_fragments != 3 && divides(*this) && !(rows_in_registers && rows_in_threadgroup) &&
         threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES;
}

int flash_bwd_head_splits(const FlashBwdSpecialisation& s, const FlashFwdProblem& problem,
                          const Gpu& gpu) {
  int best = 1;
  for (int splits = 2; s.dkv() && problem.q_length > 0 && splits <= problem.queries_per_kv;
       ++splits) {
    if (problem.queries_per_kv % splits == 0 &&
        grid_factor(s, splits, problem, gpu) < grid_factor(s, best, problem, gpu)) {
      best = splits;
    }
  }
  return best;
}

std::optional<FlashBwdSpecialisation> choose_flash_bwd(const FlashFwdProblem& problem, Gradient of,
                                                       bool exact_delta, bool tensor_tiles,
                                                       const Gpu& gpu) {
  auto s = specialisation_for<FlashBwdSpecialisation>(problem);
  s.tensor_tiles = tensor_tiles;
  s.wide_rotary = wide_rotary(problem);
  s.row_pairs = !tensor_tiles && s.wide_loads;
  s.of = of;
  s.exact_delta = exact_delta;
  return default_tile(s, gpu);
}

Defines flash_bwd_defines(const FlashBwdSpecialisation& s) {
  const bool of_rows = s.of != Gradient::kScores;
  Defines own;
  define_if(of_rows, own, s.dkv() ? "DK_SLICE" : "DQ_SLICE", s.qk_slice());
  own.push_back({s.dkv() ? "BLOCK_Q" : "BLOCK_K", s.block});
  own.push_back({"SIMDGROUPS", s.simdgroups});
  own.push_back({"ROWS_IN_REGISTERS", s.rows_in_registers});
  define_if(of_rows, own, "ROW_PAIRS", s.row_pairs);
  define_if(s.dkv(), own, "DV_SLICE", s.v_slice());
  define_if(s.dkv(), own, "SLICES", s.slices);
  define_if(s.rows_in_threadgroup, own, "ROWS_IN_THREADGROUP");
  define_if(s.column_simdgroups > 1, own, "COLUMN_SIMDGROUPS", s.column_simdgroups);
  define_if(s.head_splits > 1, own, "HEAD_SPLITS", s.head_splits);
  define_if(s.exact_delta && !s.dkv(), own, "EXACT_DELTA");
  define_if(s.normalised(), own, "NORMALISED");
  return all_defines(s, own);
}

// No more parts than keep the GPU busy: each writes float32 of all that is added, which is then
// less than twice kBusyThreadgroups tiles, however large it is.
int64_t flash_bwd_bias_splits(int64_t owned, int64_t shared) {
  if (owned == 0 || shared == 0) {
    return 1;
  }
  // Threadgroups that keep the largest GPU, of 80 cores, busy.
  constexpr int64_t kBusyThreadgroups = 80 * kSimdgroupsPerCore / kSimdgroups;
  return std::min(shared, (kBusyThreadgroups + owned - 1) / owned);
}

}  // namespace metal_attn
