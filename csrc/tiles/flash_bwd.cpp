#include "csrc/tiles/flash_bwd.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "csrc/tiles/flash_bwd_tensor.h"
#include "csrc/tiles/shared.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

// A block takes two barriers, and addresses and bounds of what is staged.
constexpr int kBlockLoads = 20;

// A load of device memory takes as long as this many of threadgroup memory.
constexpr int kRowLoads = 3;

// Whether rows of the other side are staged as they are, beside pairs.
bool stages_rows(const FlashBwdSpecialisation& s) { return s.dkv && s.column_simdgroups == 1; }

// SIMD groups that share rows and compute scores of different columns of a block.
int block_parts(const FlashBwdSpecialisation& s) {
  return s.exchanges_weights() ? s.column_simdgroups / s.row_parts() : 1;
}

}  // namespace

int FlashBwdSpecialisation::qk_slice() const {
  return tensor_tiles ? tensor_slice(*this, head_dim_qk) : slice_columns(head_dim_qk, slices);
}

int FlashBwdSpecialisation::v_slice() const {
  return tensor_tiles ? tensor_slice(*this, head_dim_v) : slice_columns(head_dim_v, slices);
}

const char* FlashBwdSpecialisation::kernel() const {
  if (tensor_tiles) {
    return dkv ? "flash_bwd_dkv_tensor" : "flash_bwd_dq_tensor";
  }
  return dkv ? "flash_bwd_dkv" : "flash_bwd_dq";
}

Tile FlashBwdSpecialisation::tile() const {
  return {{"SLICES", slices},
          {"BLOCK", block},
          {"ROW_FRAGMENTS", row_fragments},
          {"SIMDGROUPS", simdgroups},
          {"COLUMN_SIMDGROUPS", column_simdgroups},
          {"ROWS_IN_REGISTERS", rows_in_registers},
          {"ROWS_IN_THREADGROUP", rows_in_threadgroup}};
}

bool FlashBwdSpecialisation::exchanges_weights() const {
  return dkv && column_simdgroups > 1 && !tensor_tiles;
}

int FlashBwdSpecialisation::row_parts() const {
  return exchanges_weights() ? column_simdgroups / query_parts(block / 8, column_simdgroups) : 1;
}

bool FlashBwdSpecialisation::normalised() const {
  const bool others = features.bias || features.alibi || features.sink;
  return exact_delta && (element == Element::kFloat || (!dkv && others));
}

// Fitted to bench/results/registers.md. The factors below 1 are of tiles that are only partly alive
// where most registers are in use.
int FlashBwdSpecialisation::registers() const {
  if (tensor_tiles) {
    return tensor_registers(*this);
  }
  const int pair = fragment_registers(sizeof(float));
  const int gradients =
      row_fragments * (qk_slice() + (dkv ? v_slice() : 0)) / 8 / column_simdgroups * pair;
  // Weights and their gradients; with a cap its slope too. With dropout dk and dv have weights of
  // their own, and random numbers.
  const bool drops = dkv && features.dropout;
  const int score_tiles = 2 + second_chains(*this) + (features.score_slopes() ? 1 : 0) + drops;
  const int shared = exchanges_weights() ? column_simdgroups : 1;
  const int scores = row_fragments * score_tiles * block / 8 * pair / shared;
  // A thread's share of the staged tiles.
  const int own_columns = stages_rows(*this) ? qk_slice() + v_slice() : 0;
  const int columns = head_dim_qk + head_dim_v + own_columns;
  const int staged = block * columns * element_bytes(element) / 4 / threads();
  const bool is_float32 = element == Element::kFloat;
  // Of float32 gradients, what leaves little room for the rest.
  const int crowding = is_float32 ? std::max(gradients - 32, 0) : 0;
  // Chunks that do not divide evenly among threads.
  const bool uneven =
      head_dim_qk % 32 != 0 || head_dim_v % 32 != 0 || (block == 24 && simdgroups > kSimdgroups);
  const int held = held_registers(*this) / (dkv ? row_parts() : column_simdgroups);
  const bool rereads_rows = !rows_in_registers && !rows_in_threadgroup;
  // Features of scores hold registers beside the fragments that are loaded ahead.
  const bool adds_to_scores = features.mask || features.bias || features.alibi || features.sink ||
                              features.dropout || (is_float32 && block == 24);
  const bool rotates = dkv && features.rotary;
  const int loaded_ahead = rows_in_threadgroup ? (adds_to_scores ? 7 : 0) + (rotates ? 14 : 0)
                           : is_float32 && adds_to_scores ? 3
                                                          : 0;
  const int added = feature_registers(features) + loaded_ahead;
  if (exchanges_weights()) {
    const int gathered = row_fragments * block / 8 * pair;
    // Rows that are read again leave no room for loads of what is staged.
    const double loads = rereads_rows ? (simdgroups > kSimdgroups ? 9 : -2) : 0.68 * staged;
    const double tiles = 0.84 * gradients + 0.9 * held + 1.17 * scores + 0.31 * gathered;
    return int(std::lround(48 + tiles + loads + 0.3 * crowding)) + (uneven ? 2 : 0) +
           (is_float32 ? 4 : 0) + (adds_to_scores ? 3 : 0) + 8 * drops + added;
  }
  if (dkv) {
    const double tiles =
        0.68 * gradients + 0.6 * held + 0.75 * scores + 0.34 * staged + 1.2 * crowding;
    return int(std::lround(70 + tiles)) +
           (rows_in_registers ? 12
            : rereads_rows    ? 2 * row_fragments
                              : -1) +
           (uneven ? 14 : 0) + (is_float32 ? std::max(head_dim_qk - 192, 0) / 7 : 0) + 16 * drops +
           (features.score_slopes() ? 2 : 0) + (features.sink && rows_in_threadgroup ? 6 : 0) +
           (features.rotary && rereads_rows ? 20 : 0) + added;
  }
  const double tiles =
      0.57 * gradients + 0.79 * held + 0.5 * scores + 0.22 * staged + 0.3 * crowding;
  const int rotated = features.rotary ? (features.rotary->k ? 12 : 3) : 0;
  return int(std::lround(62 + tiles)) +
         (rereads_rows          ? 7 * row_fragments
          : rows_in_threadgroup ? 8
                                : 0) +
         (uneven ? (rows_in_threadgroup || block == 24 ? 9 : 2) : 0) +
         (is_float32 ? (rereads_rows          ? 5
                        : rows_in_threadgroup ? (row_fragments > 1 ? 11 : 0)
                                              : 16)
                     : 0) +
         (rereads_rows && second_chains(*this) > 0 && block > 8 ? 15 : 0) +
         11 * (row_fragments - 1) + (rows_in_registers && adds_to_scores ? 4 : 0) +
         std::max(head_dim_qk - 256, 0) / 24 + rotated + added;
}

int FlashBwdSpecialisation::threadgroup_bytes() const {
  if (tensor_tiles) {
    return tensor_threadgroup_bytes(*this);
  }
  const int pairs = pair_columns(*this);
  const int rows = stages_rows(*this) ? padded(qk_slice()) + padded(v_slice()) : 0;
  const int row_statistics = normalised() ? 3 : 2;
  const int statistics = dkv ? row_statistics * block : exact_delta ? simdgroups : 0;
  // dq's SIMD groups that share rows keep a part of their columns each.
  const int column_parts = dkv ? 1 : column_simdgroups;
  const int chunks = kept_chunks(fragments(head_dim_qk) / column_parts, element) +
                     kept_chunks(fragments(head_dim_v) / column_parts, element);
  const int kept = rows_in_threadgroup ? 32 * block_rows() / 8 * column_parts * chunks * 16 : 0;
  // Of scores or weights and of their gradients; dq's are parts of each.
  const int scores = block_rows() * block * (dkv ? 1 : column_simdgroups);
  const int parts = column_simdgroups > 1 ? 2 * scores * int(sizeof(float)) : 0;
  return block * (pairs + rows) * element_bytes(element) + statistics * int(sizeof(float)) + kept +
         parts;
}

namespace {

// What a thread loads and multiplies for 8 rows of its side and 32 of the other. A replay had its
// tiles in nearly the same order (bench/results/replay.md).
double cost(const FlashBwdSpecialisation& s) {
  const int columns = fragments(s.head_dim_qk) + fragments(s.head_dim_v);
  const int own_columns = (s.qk_slice() + (s.dkv ? s.v_slice() : 0)) / 8;
  const double blocks = 32.0 / s.block;
  const int products = (columns + own_columns) * 4;
  const double read = 4.0 * (columns * s.row_parts() + own_columns) / s.row_fragments;
  double work = products + 1.5 * read;
  if (s.row_fragments * s.block == 8) {
    work *= 1.25;  // one fragment of scores: every product waits for the one before
  }
  double rows = 0.0;
  if (s.rows_in_threadgroup) {
    rows = kept_chunks(columns, s.element);
  } else if (!s.rows_in_registers) {
    rows = kRowLoads * columns * row_loads(s);
  }
  const int staged_columns = columns + (stages_rows(s) ? own_columns : 0);
  const double staged = staging_cost(staged_columns, element_bytes(s.element), s.block_rows());
  // Parts of scores and of their gradients, and a barrier.
  const double exchanged = s.exchanges_weights()     ? 8 + 8 * s.column_simdgroups + blocks * 10
                           : s.column_simdgroups > 1 ? 32 + blocks * 40
                                                     : 0;
  // Eight stage a tile for more rows, but fewer such threadgroups fit on a core.
  const double fewer = s.simdgroups > kSimdgroups ? 1.04 : 1.0;
  return fewer * s.slices *
         (work + staged + exchanged + blocks * (rows * block_parts(s) + kBlockLoads));
}

// What a grid with so many splits of a KV head's query heads takes longer than the products alone.
double grid_factor(const FlashBwdSpecialisation& s, int splits, const FlashFwdProblem& problem,
                   const Gpu& gpu) {
  const double tiles = double(s.dkv ? problem.keys : problem.queries) / s.block_rows();
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

double cost(const FlashBwdSpecialisation& s, const FlashFwdProblem& problem, const Gpu& gpu) {
  return cost(s) * grid_factor(s, flash_bwd_head_splits(s, problem, gpu), problem, gpu);
}

// Whether the columns and the scores can be divided among the SIMD groups that share rows.
bool divides(const FlashBwdSpecialisation& s) {
  const int parts = s.column_simdgroups;
  if (parts == 1) {
    return s.row_fragments <= 2;
  }
  const int qk = fragments(s.head_dim_qk);
  const int v = fragments(s.head_dim_v);
  const int own = 8 * parts;
  if (s.simdgroups % parts != 0 || s.qk_slice() % own != 0 || s.v_slice() % own != 0) {
    return false;
  }
  if (s.exchanges_weights()) {
    return s.row_fragments % s.row_parts() == 0;
  }
  return parts == 2 && s.row_fragments <= 2 && qk % 2 == 0 && v % 2 == 0 &&
         std::max(s.head_dim_qk, s.head_dim_v) > kFewColumns;
}

// The tiles with as many slices as `s` that fit in threadgroup memory and in the blocks of a
// BlockMask.
template <class Visit>
void each_of_slices(FlashBwdSpecialisation s, const Visit& visit) {
  const int fewest = simdgroups_for(s.dkv ? s.features.kv_block() : s.features.q_block());
  for (int column_simdgroups : {1, 2, 4}) {
    s.column_simdgroups = column_simdgroups;
    for (int simdgroups : {fewest, 2 * fewest}) {
      s.simdgroups = simdgroups;
      for (int block : {32, 24, 16, 8}) {
        s.block = block;
        for (int row_fragments : {4, 2, 1}) {
          s.row_fragments = row_fragments;
          if (!divides(s)) {
            continue;
          }
          for (int place = 0; place < 3; ++place) {
            s.rows_in_registers = place == 0;
            s.rows_in_threadgroup = place == 1;
            const int queries = s.dkv ? s.block : s.block_rows();
            const int keys = s.dkv ? s.block_rows() : s.block;
            if (s.threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES &&
                within_blocks(s.features, queries, keys)) {
              visit(s);
            }
          }
        }
      }
    }
  }
}

int most_slices(const FlashBwdSpecialisation& s) {
  return std::max(fragments(s.head_dim_qk), fragments(s.head_dim_v));
}

// Of what has enough registers the cheapest. If nothing has, what lacks fewest: it spills.
std::optional<FlashBwdSpecialisation> choose_flash_bwd(const FlashFwdProblem& problem, bool dkv,
                                                       bool exact_delta, const Gpu& gpu) {
  auto s = specialisation_for<FlashBwdSpecialisation>(problem);
  s.wide_rotary = wide_rotary(problem);
  s.row_pairs = s.wide_loads;
  s.dkv = dkv;
  s.exact_delta = exact_delta;

  const auto rank = [&](const FlashBwdSpecialisation& one) {
    return std::pair(std::max(one.registers() - register_limit(gpu), 0), cost(one, problem, gpu));
  };
  std::optional<FlashBwdSpecialisation> best;
  std::pair<int, double> best_rank;
  for (s.slices = 1; s.slices <= most_slices(s); ++s.slices) {
    const std::pair<int, double> before = best_rank;
    each_of_slices(s, [&](const FlashBwdSpecialisation& one) {
      if (!best || rank(one) < best_rank) {
        best = one;
        best_rank = rank(one);
      }
    });
    // Each slice computes the scores again: if one more was no better, two more are not either.
    if (best && best_rank.first == 0 && best_rank == before) {
      break;
    }
  }
  return best;
}

}  // namespace

int flash_bwd_head_splits(const FlashBwdSpecialisation& s, const FlashFwdProblem& problem,
                          const Gpu& gpu) {
  int best = 1;
  for (int splits = 2; s.dkv && problem.q_length > 0 && splits <= problem.queries_per_kv;
       ++splits) {
    if (problem.queries_per_kv % splits == 0 &&
        grid_factor(s, splits, problem, gpu) < grid_factor(s, best, problem, gpu)) {
      best = splits;
    }
  }
  return best;
}

std::optional<FlashBwdSpecialisation> choose_flash_bwd_dq(const FlashFwdProblem& problem,
                                                          bool exact_delta, const Gpu& gpu) {
  return choose_flash_bwd(problem, false, exact_delta, gpu);
}

std::optional<FlashBwdSpecialisation> choose_flash_bwd_dkv(const FlashFwdProblem& problem,
                                                           bool exact_delta, const Gpu& gpu) {
  return choose_flash_bwd(problem, true, exact_delta, gpu);
}

void for_each_tile(const FlashBwdSpecialisation& like,
                   const TileVisitor<FlashBwdSpecialisation>& visit) {
  FlashBwdSpecialisation s = like;
  bool done = like.tensor_tiles;  // which have no others yet
  std::pair<int, int> before{};
  for (s.slices = 1; s.slices <= most_slices(s) && !done; ++s.slices) {
    // More slices of the same columns are empty ones.
    const std::pair<int, int> columns{s.qk_slice(), s.v_slice()};
    if (columns == std::exchange(before, columns)) {
      continue;
    }
    each_of_slices(s, [&visit, &done](const FlashBwdSpecialisation& one) {
      done = done || visit(one, cost(one));
    });
  }
}

Defines flash_bwd_defines(const FlashBwdSpecialisation& s) {
  Defines own{
      {s.dkv ? "DK_SLICE" : "DQ_SLICE", s.qk_slice()},
      {s.dkv ? "BLOCK_Q" : "BLOCK_K", s.block},
      {"SIMDGROUPS", s.simdgroups},
      {"ROWS_IN_REGISTERS", s.rows_in_registers},
      {"ROW_PAIRS", s.row_pairs},
  };
  if (s.dkv) {
    own.push_back({"DV_SLICE", s.v_slice()});
    own.push_back({"SLICES", s.slices});
  }
  if (s.rows_in_threadgroup) {
    own.push_back({"ROWS_IN_THREADGROUP", 1});
  }
  if (s.column_simdgroups > 1) {
    own.push_back({"COLUMN_SIMDGROUPS", s.column_simdgroups});
  }
  if (s.head_splits > 1) {
    own.push_back({"HEAD_SPLITS", s.head_splits});
  }
  if (s.exact_delta && !s.dkv) {
    own.push_back({"EXACT_DELTA", 1});
  }
  if (s.normalised()) {
    own.push_back({"NORMALISED", 1});
  }
  return all_defines(s, own, s.wide_rotary);
}

}  // namespace metal_attn
