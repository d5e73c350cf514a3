#include "csrc/tiles/flash_decode.h"

#include <algorithm>
#include <limits>

#include "csrc/problem/merge.h"
#include "csrc/tiles/shared.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

// Columns of a row that one lane's load and three others' make (shaders/spans.h).
constexpr int kSpanFragments = kSpanColumns / 8;

int spans(int columns) { return (columns + kSpanColumns - 1) / kSpanColumns; }

// Of rows that a tile can have, so that 32 query heads of one KV head read its keys once.
constexpr int64_t kMaxDecodeRows = 32;

// Waves of threadgroups among which a number of splits is looked for.
constexpr int kMostWaves = 4;

// Splits are merged by a launch of its own, which is estimated as so many keys of a threadgroup.
constexpr int64_t kMergeKeys = 64;

// 8-key fragments of a block whose values are loaded before its scores; and from how many spans of
// values on that is done, as fewer are too few loads at a time (bench/results/replay.md).
constexpr int kFirstKeyFragments = 2;
constexpr int kFirstSpans = 4;
constexpr int kFirstVectorKeyFragments = 1;

// Of so few rows the matrix unit would mostly multiply zeros: lanes have units of 8 columns of the
// values instead, 4 lanes or more a key. Three or four would not fit in the registers of M1.
constexpr int64_t kMostVectorRows = 2;
constexpr int kUnitColumns = 8;
constexpr int kFewestKeyLanes = 4;

int power_of_2(int64_t least) {
  int power = 1;
  while (power < least) {
    power *= 2;
  }
  return power;
}

// As many lanes as leave each no more sums than the matrix unit would, but no more than have
// columns.
void set_vector_rows(FlashDecodeSpecialisation& s, int64_t rows) {
  s.vector_rows = power_of_2(rows);
  const int units = (s.head_dim_v + kUnitColumns - 1) / kUnitColumns;
  s.key_lanes =
      std::max(kFewestKeyLanes, std::min(kFewestKeyLanes * s.vector_rows, power_of_2(units)));
}

// Columns of the units of all lanes that share a value's row.
int padded_columns(const FlashDecodeSpecialisation& s) {
  const int together = kUnitColumns * s.key_lanes;
  return (s.head_dim_v + together - 1) / together * together;
}

bool suits_vectors(const FlashDecodeSpecialisation& s, int64_t rows) {
  return rows <= kMostVectorRows && s.column_simdgroups == 1 && !s.v_in_k;
}

// Of 32 columns of keys or values, and of the scales that they have of their own.
int span_bytes(const FlashDecodeSpecialisation& s) {
  constexpr int kScaleBytes = 2;
  switch (s.features.cache.format) {
    case KvFormat::kPlain:
      return kSpanColumns * element_bytes(kv_element(s));
    case KvFormat::kQ8_0:
      return kSpanColumns + kScaleBytes;
    case KvFormat::kQ4_0:
      return kSpanColumns / 2 + kScaleBytes;
    default:
      return kSpanColumns;
  }
}

int own_spans(int columns, int simdgroups) {
  return (spans(columns) + simdgroups - 1) / simdgroups;
}

// Whether no block of keys spans two blocks of a BlockMask. All queries have one list.
bool within_listed_blocks(const FlashDecodeSpecialisation& s) {
  return s.features.kv_block() % (8 * s.key_fragments) == 0;
}

}  // namespace

int FlashDecodeSpecialisation::registers() const {
  const int q_operand = fragment_registers(element_bytes(element));
  const int kv_operand = fragment_registers(element_bytes(kv_element(*this)));
  const int sum = fragment_registers(sizeof(float));
  const int qk_spans = own_spans(head_dim_qk, column_simdgroups);
  const int v_spans = own_spans(head_dim_v, column_simdgroups);
  // Products and the scores that they become, and one chain of products.
  const int scores = row_fragments * (2 * key_fragments + 1) * sum;
  const bool all_values = v_in_k || v_first || vector_rows > 0;
  // Codes of a unit and their scale take fewer registers than their numbers.
  const KvFormat format = features.cache.format;
  const bool codes = format == KvFormat::kQ8_0 || format == KvFormat::kQ4_0;
  const int unit = kSpanFragments * kv_operand;
  const int units = unit + (all_values ? v_spans : 1) * key_fragments * (codes ? 3 : unit);
  // Weights of a lane's keys, and what a second assignment of lanes holds.
  const int lanes = vector_rows > 0 ? key_fragments * key_lanes / 4 * vector_rows + 5 : 0;
  const int out = vector_rows > 0 ? vector_rows * padded_columns(*this) / key_lanes
                                  : row_fragments * kSpanFragments * v_spans * sum;
  const int tiles = row_fragments * kSpanFragments * qk_spans * q_operand + out;
  // Columns that are no whole spans, or not the same number for each SIMD group.
  const bool ragged = head_dim_qk % kSpanColumns != 0 || head_dim_v % kSpanColumns != 0 ||
                      spans(head_dim_qk) % column_simdgroups != 0 ||
                      spans(head_dim_v) % column_simdgroups != 0;
  const int held = row_fragments * std::max(qk_spans, v_spans) * q_operand;
  const int guards = !ragged ? 0 : held > 4 ? 40 : q_operand > 1 ? 16 : 0;
  const int needed = 20 + guards + tiles + scores + units + lanes;
  // Loads of keys and values in flight take what is left.
  const int wanted = 18 + 7 * tiles / 4 + 8 * key_fragments;
  return std::max(needed, std::min(wanted, 112)) + feature_registers(features);
}

Tile FlashDecodeSpecialisation::tile() const {
  Tile tile{{"ROW_FRAGMENTS", row_fragments},
            {"KEY_FRAGMENTS", key_fragments},
            {"KEY_SIMDGROUPS", key_simdgroups},
            {"COLUMN_SIMDGROUPS", column_simdgroups},
            {"V_FIRST", v_first}};
  if (vector_rows > 0) {
    tile.push_back({"VECTOR_ROWS", vector_rows});
  }
  return tile;
}

int FlashDecodeSpecialisation::threadgroup_bytes() const {
  const int tiles = key_simdgroups * column_simdgroups + (column_simdgroups > 1 ? 1 : 0);
  int floats = tiles * 8 * row_fragments * padded(8 * key_fragments);
  int q_elements = 0;
  if (vector_rows > 0) {
    // Weights with their corrections, and out of each SIMD group.
    floats += key_simdgroups * vector_rows * (8 * key_fragments + 1 + padded_columns(*this));
  }
  if (key_simdgroups > 1) {
    constexpr int kFragmentElements = 64;
    const int span_elements = row_fragments * kSpanFragments * kFragmentElements;
    floats +=
        (vector_rows > 0 ? 0 : spans(head_dim_v) * span_elements) + 2 * key_simdgroups * rows();
    q_elements = spans(head_dim_qk) * span_elements;
  }
  return floats * int(sizeof(float)) + q_elements * element_bytes(element);
}

// All rows at once if they fit, so that keys are read once; then the fewest SIMD groups that share
// them, since those meet at barriers; then values loaded before the scores, so that a block waits
// for memory once; then the largest block.
FlashDecodeSpecialisation choose_flash_decode(const FlashFwdProblem& problem, int64_t rows,
                                              bool v_in_k, const Gpu& gpu) {
  const auto suits = [&gpu](const FlashDecodeSpecialisation& one) {
    return fits(one, gpu) && within_listed_blocks(one);
  };
  auto s = specialisation_for<FlashDecodeSpecialisation>(problem);
  s.v_in_k = v_in_k;
  const int wanted = static_cast<int>((std::clamp<int64_t>(rows, 1, kMaxDecodeRows) + 7) / 8);
  const int all_spans = std::max(spans(s.head_dim_qk), spans(s.head_dim_v));
  // One row fragment fits whatever the head dims.
  for (s.row_fragments = wanted;; --s.row_fragments) {
    for (int share = all_spans; share > 0; --share) {
      s.column_simdgroups = (all_spans + share - 1) / share;
      s.key_simdgroups = s.column_simdgroups > 1 ? 1 : kSimdgroups;
      for (bool vectors : {true, false}) {
        s.vector_rows = s.key_lanes = 0;
        if (vectors && !suits_vectors(s, rows)) {
          continue;
        }
        if (vectors) {
          set_vector_rows(s, rows);
        }
        s.key_fragments = kFirstKeyFragments;
        s.v_first =
            !v_in_k && !vectors && (s.column_simdgroups > 1 || spans(s.head_dim_v) >= kFirstSpans);
        if (s.v_first && suits(s)) {
          return s;
        }
        for (int key_fragments : {4, 2, 1}) {
          s.key_fragments = key_fragments;
          s.v_first = vectors && key_fragments == kFirstVectorKeyFragments;
          if (suits(s)) {
            return s;
          }
        }
      }
    }
  }
}

void for_each_tile(const FlashDecodeSpecialisation& like,
                   const TileVisitor<FlashDecodeSpecialisation>& visit) {
  constexpr int kMostFragments = static_cast<int>(kMaxDecodeRows / 8);
  FlashDecodeSpecialisation s = like;
  const int all_spans = std::max(spans(s.head_dim_qk), spans(s.head_dim_v));
  // Fewer rows than the estimated tile's read the keys more often, and more are of no use.
  const auto cost = [&like](int fragments) {
    return fragments > like.row_fragments ? kHopeless : double(like.row_fragments - fragments);
  };
  for (s.row_fragments = kMostFragments; s.row_fragments > 0; --s.row_fragments) {
    for (int share = all_spans; share > 0; --share) {
      s.column_simdgroups = (all_spans + share - 1) / share;
      s.key_simdgroups = s.column_simdgroups > 1 ? 1 : kSimdgroups;
      for (bool v_first : {true, false}) {
        for (int key_fragments : {4, 2, 1}) {
          for (int vector_rows : {like.vector_rows, 0}) {
            const bool vectors = vector_rows > 0;
            s.v_first = v_first;
            s.key_fragments = key_fragments;
            s.vector_rows = vector_rows;
            s.key_lanes = vectors ? like.key_lanes : 0;
            const int first = vectors ? kFirstVectorKeyFragments : kFirstKeyFragments;
            const bool loaded = !v_first || (!s.v_in_k && key_fragments == first);
            const bool room =
                s.threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES && within_listed_blocks(s);
            const bool own = !vectors || (s.row_fragments == 1 && s.column_simdgroups == 1);
            if (loaded && room && own && visit(s, cost(s.row_fragments))) {
              return;
            }
            if (like.vector_rows == 0) {
              break;
            }
          }
        }
      }
    }
  }
}

// Whole waves of threadgroups: the last one takes as long as the others however few it has. Of the
// numbers of splits that make such waves the fastest is taken, if a wave takes as long as what its
// threadgroups read and write: keys, once a pass, queries and float32 results, written and read
// again.
int64_t flash_decode_splits(const FlashDecodeSpecialisation& s, int64_t groups, int64_t rows,
                            int64_t keys, int cores) {
  const int64_t steps = (keys + s.step_keys() - 1) / s.step_keys();
  if (steps == 0 || groups == 0) {
    return 1;
  }
  const int64_t q_bytes = s.head_dim_qk * element_bytes(s.element);
  const int64_t own = rows * (q_bytes + 2 * s.head_dim_v * int64_t(sizeof(float)));
  const int64_t key = s.passes(rows) * (s.head_dim_qk + (s.v_in_k ? 0 : s.head_dim_v)) *
                      span_bytes(s) / kSpanColumns;
  const int64_t most = std::clamp<int64_t>(keys * key / own, 1, std::min(steps, kMaxSplits));
  const int64_t slots = std::max<int64_t>(kSimdgroupsPerCore * cores * 32 / s.threads(), 1);
  int64_t best = 1;
  double best_time = std::numeric_limits<double>::infinity();
  for (int64_t waves = 0; waves <= kMostWaves; ++waves) {  // 0: one split
    const int64_t splits = std::clamp<int64_t>(waves * slots / groups, 1, most);
    const auto needed = static_cast<double>((splits * groups + slots - 1) / slots);
    const double merge = splits > 1 ? double(kMergeKeys * key) : 0.0;
    const double time = needed * double(keys * key + splits * own) / double(splits) + merge;
    if (time < best_time) {
      best_time = time;
      best = splits;
    }
  }
  const int64_t split_steps = (steps + best - 1) / best;
  return (steps + split_steps - 1) / split_steps;
}

Defines flash_decode_defines(const FlashDecodeSpecialisation& s, bool split) {
  Defines own{
      {"KEY_FRAGMENTS", s.key_fragments},
      {"KEY_SIMDGROUPS", s.key_simdgroups},
      {"COLUMN_SIMDGROUPS", s.column_simdgroups},
  };
  if (split) {
    own.push_back({"SPLIT", 1});
  }
  if (s.v_in_k) {
    own.push_back({"V_IN_K", 1});
  }
  if (s.v_first) {
    own.push_back({"V_FIRST", 1});
  }
  if (s.vector_rows > 0) {
    own.push_back({"VECTOR_ROWS", s.vector_rows});
    own.push_back({"KEY_LANES", s.key_lanes});
  }
  return all_defines(s, own, false);
}

std::string describe_choice(const FlashDecodeSpecialisation& s, int64_t rows, int64_t row_groups,
                            int64_t splits, const Gpu& gpu) {
  return std::to_string(splits) + " splits of the keys; " + std::to_string(rows) +
         " queries of a KV head in " + std::to_string(s.passes(rows)) + " passes over its keys" +
         (row_groups > 1 ? ", each by threadgroups of its own" : "") +
         (s.v_in_k ? ", which hold the values too" : "") + "; " + std::to_string(s.key_simdgroups) +
         " SIMD groups with their own keys, " + std::to_string(s.column_simdgroups) +
         " with their own columns" +
         (s.vector_rows > 0 ? ", values without the matrix unit: " : ": ") + register_text(s, gpu);
}

}  // namespace metal_attn
