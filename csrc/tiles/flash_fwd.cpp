#include "csrc/tiles/flash_fwd.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>

#include "csrc/tiles/flash_fwd_tensor.h"
#include "csrc/tiles/shared.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

// A threadgroup accumulates at most this many columns of the output. Wider values are cut into
// slices over the grid, each of which computes the scores again: 512 columns of accumulators alone
// would take all 128 registers that a thread of M1 can have.
constexpr int kMaxSlice = 256;

// A block takes barriers and a rescaling of the output.
constexpr int kBlockLoads = 12;

// Loads of threadgroup memory that take as long as one load of two neighbours of Q from device
// memory.
int row_load_cost(const FlashFwdSpecialisation& s) {
  return (s.element == Element::kFloat ? 1 : 2) * row_loads(s);
}

int own_qk_fragments(const FlashFwdSpecialisation& s) {
  return fragments(s.head_dim_qk) / s.column_simdgroups;
}

int q_chunks(const FlashFwdSpecialisation& s) {
  return kept_chunks(own_qk_fragments(s), s.element);
}

// What a thread loads, and its blocks, for 32 keys and 8 queries. A replay had its tiles in this
// order, and their times in about this proportion (bench/results/replay.md).
double cost(const FlashFwdSpecialisation& s) {
  const int columns = fragments(s.head_dim_qk) + s.v_slice / 8;
  const double blocks = 32.0 / s.block_k;
  // Without staging each SIMD group loads for its own rows alone.
  const int sharing_rows = s.kv_staged ? s.block_q() : 8 * s.row_fragments;
  const double staged = staging_cost(columns, element_bytes(kv_element(s)), sharing_rows);
  // Then a load of 16 bytes took longer in a replay, and each block about what a load costs more.
  const double read = s.kv_staged ? columns * 4.0 / s.row_fragments : 0.25 * staged + 4 * blocks;
  double q = 0.0;
  if (s.q_in_threadgroup) {
    q = s.column_simdgroups * q_chunks(s);
  } else if (!s.q_in_registers) {
    q = fragments(s.head_dim_qk) * row_load_cost(s);
  }
  const double exchanged = s.column_simdgroups > 1 ? 32 / 8 * 2 * s.column_simdgroups : 0;
  return s.v_slices() *
         (read + staged + exchanged + blocks * (q + kBlockLoads * s.column_simdgroups));
}

double cost(const FlashFwdSpecialisation& s, int64_t queries, const Gpu& gpu) {
  const double tiles = double(queries) / s.block_q();
  return cost(s) * idle_factor(tiles * s.v_slices() * s.simdgroups, s.features.band, gpu);
}

// Whether two SIMD groups can share rows, with as many columns each.
bool shares_columns(const FlashFwdSpecialisation& s) {
  return fragments(s.head_dim_qk) % 2 == 0 && s.v_slice / 8 % 2 == 0 &&
         std::max(s.head_dim_qk, s.v_slice) > kFewColumns;
}

// Whether SIMD groups can read K and V themselves, in chunks of 16 bytes (shaders/unstaged.h). How
// many make a threadgroup hardly matters then.
bool reads_unstaged(const FlashFwdSpecialisation& s) {
  const int chunk = 16 / element_bytes(kv_element(s));
  return s.simdgroups == kSimdgroups && s.column_simdgroups == 1 &&
         s.head_dim_qk % (8 * chunk) == 0 && s.v_slice % kSpanColumns == 0;
}

// The tiles with the slices of `s`, those with the most keys a block first.
template <class Visit>
void each_of_slice(FlashFwdSpecialisation s, std::initializer_list<int> all_simdgroups,
                   const Visit& visit) {
  for (int block_k : {32, 24, 16, 8}) {
    s.block_k = block_k;
    for (int row_fragments : {2, 1}) {
      s.row_fragments = row_fragments;
      for (int column_simdgroups : {1, 2}) {
        s.column_simdgroups = column_simdgroups;
        for (int simdgroups : all_simdgroups) {
          s.simdgroups = simdgroups;
          // Eight where they have no more rows than four can have.
          if (s.block_q() > 16 * kSimdgroups || simdgroups % column_simdgroups != 0 ||
              (column_simdgroups > 1 && !shares_columns(s))) {
            continue;
          }
          s.kv_staged = true;
          for (int place = 0; place < 3; ++place) {
            s.q_in_registers = place == 0;
            s.q_in_threadgroup = place == 1;
            visit(s);
          }
          if (reads_unstaged(s)) {
            s.kv_staged = false;
            s.q_in_registers = true;
            visit(s);
          }
        }
      }
    }
  }
}

int fewest_slices(int head_dim_v) { return (head_dim_v + kMaxSlice - 1) / kMaxSlice; }

}  // namespace

Tile FlashFwdSpecialisation::tile() const {
  return {{"V_SLICE", v_slice},
          {"BLOCK_K", block_k},
          {"ROW_FRAGMENTS", row_fragments},
          {"SIMDGROUPS", simdgroups},
          {"COLUMN_SIMDGROUPS", column_simdgroups},
          {"Q_IN_REGISTERS", q_in_registers},
          {"Q_IN_THREADGROUP", q_in_threadgroup},
          {"KV_STAGED", kv_staged}};
}

int FlashFwdSpecialisation::registers() const {
  if (tensor_tiles) {
    return tensor_registers(*this);
  }
  const int pair = fragment_registers(sizeof(float));
  const int operand = fragment_registers(element_bytes(kv_element(*this)));
  const int q =
      row_fragments * own_qk_fragments(*this) * fragment_registers(element_bytes(element));
  const int out = row_fragments * v_slice / 8 / column_simdgroups * pair;
  const int chains = 8 * own_qk_fragments(*this) > CHAIN_COLUMNS ? 2 : 1;
  const int scores = chains * row_fragments * block_k / 8 * pair;
  // A thread's share of the tiles, on its way to threadgroup memory. Half precision's is covered by
  // what the products need.
  const int columns = 8 * fragments(head_dim_qk) + v_slice;
  const int staged = kv_staged ? block_k * columns * operand / 2 / threads() : 0;
  const int in_flight = operand > 1 ? std::max(staged - 16, 0) : 0;
  // Weights, and the fragments of k and v that they meet. Fragments of Q that are read from
  // threadgroup memory are loaded early.
  const double base = q_in_threadgroup ? 26.4 : kv_staged ? 44 : 56;
  const double weights = (q_in_threadgroup ? 3.0 : 1.9) * scores;
  const double tiles = base + 0.9 * out + 0.8 * (q_in_registers ? q : 0) + weights;
  // Chunks that do not divide evenly among threads.
  const bool uneven = head_dim_qk % 32 != 0 || v_slice % 32 != 0;
  int others = column_simdgroups > 1 ? (chains > 1 ? 8 : 4) + (block_k == 24 ? 12 : 0) : 0;
  if (q_in_threadgroup) {
    others += (uneven ? 12 : 0) + (operand > 1 ? 26 : 0);
  }
  return int(std::ceil(tiles + 0.55 * in_flight)) + others + feature_registers(features);
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
  const int lanes = threads() * row_fragments;
  return tiles + (q_in_threadgroup ? lanes * q_chunks(*this) * 16 : 0) +
         (shared ? lanes * block_k / 8 * 2 * int(sizeof(float)) : 0);
}

FlashFwdSpecialisation choose_flash_fwd(const FlashFwdProblem& problem, const Gpu& gpu) {
  auto s = specialisation_for<FlashFwdSpecialisation>(problem);
  s.wide_rotary = wide_rotary(problem);
  s.row_pairs = problem.q_pairs;

  // The cheapest of what fits; of equals the first, which has the most keys a block. Tiles without
  // staging were slower in a replay (bench/results/replay.md), so only `tune` tries them.
  std::optional<FlashFwdSpecialisation> best;
  double best_cost = 0.0;
  const int fewest = simdgroups_for(s.features.q_block());
  for (int slices = fewest_slices(problem.head_dim_v); !best; ++slices) {
    s.v_slice = slice_columns(problem.head_dim_v, slices);
    each_of_slice(s, {fewest, 2 * fewest}, [&](const FlashFwdSpecialisation& one) {
      if (!one.kv_staged) {
        return;
      }
      const double one_cost = cost(one, problem.queries, gpu);
      if (fits(one, gpu) && within_blocks(one.features, one.block_q(), one.block_k) &&
          (!best || one_cost < best_cost)) {
        best = one;
        best_cost = one_cost;
      }
    });
  }
  return *best;
}

void for_each_tile(const FlashFwdSpecialisation& like,
                   const TileVisitor<FlashFwdSpecialisation>& visit) {
  FlashFwdSpecialisation s = like;
  bool done = like.tensor_tiles;  // which have no others yet
  const std::initializer_list<int> all{kSimdgroups, 2 * kSimdgroups, kSimdgroups / 2};
  const int first = fewest_slices(s.head_dim_v);
  for (int slices = first; slices <= fragments(s.head_dim_v) && !done; ++slices) {
    s.v_slice = slice_columns(s.head_dim_v, slices);
    each_of_slice(s, all, [&visit, &done](const FlashFwdSpecialisation& one) {
      const bool room = one.threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES &&
                        within_blocks(one.features, one.block_q(), one.block_k);
      done = done || (room && visit(one, cost(one)));
    });
  }
}

Defines flash_fwd_defines(const FlashFwdSpecialisation& s) {
  Defines own{
      {"V_SLICE", s.v_slice},       {"BLOCK_K", s.block_k},
      {"SIMDGROUPS", s.simdgroups}, {"Q_IN_REGISTERS", s.q_in_registers},
      {"ROW_PAIRS", s.row_pairs},
  };
  if (s.q_in_threadgroup) {
    own.push_back({"Q_IN_THREADGROUP", 1});
  }
  if (s.column_simdgroups > 1) {
    own.push_back({"COLUMN_SIMDGROUPS", s.column_simdgroups});
  }
  if (!s.kv_staged) {
    own.push_back({"KV_STAGED", 0});
  }
  return all_defines(s, own, s.wide_rotary);
}

std::string describe_choice(const FlashFwdSpecialisation& s, const Gpu& gpu) {
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
  const std::string bytes = std::to_string(kv_load_bytes(s.element, s.features.cache.format));
  std::string loads = bytes + "-byte loads of k and v";
  if (!s.wide_loads) {
    loads = "element-wise loads of k and v, as some row is not " + bytes +
            "-byte aligned or a head dim is no multiple of 8";
  }
  if (s.features.rotary && s.features.rotary->k && !s.wide_rotary) {
    loads += "; k rotated element by element";
  }
  const char* q = s.q_in_registers     ? "in registers"
                  : s.q_in_threadgroup ? "in threadgroup memory"
                                       : "read again for every block";
  const std::string rows =
      std::to_string(8 * s.row_fragments) + " queries " +
      (s.column_simdgroups > 1 ? "two SIMD groups, half the columns each," : "a SIMD group");
  return (s.tensor_tiles ? "tensor tiles: " : "") + rows + " and Q " + q + ": " +
         register_text(s, gpu) + "; " + std::to_string(s.block_k) + " keys a block" + staged +
         slices + loads;
}

}  // namespace metal_attn
