#include "csrc/tiles/flash_decode.h"

#include "csrc/tiles/shared.h"
#include "csrc/tiles/table.inc"
#include "shaders/params/decode.h"

namespace metal_attn {
namespace {

constexpr DefaultRow<FlashDecodeTile> kRows[] = {FLASH_DECODE_ROWS(DECODE_TILE_ROW)};

constexpr int kSpanFragments = kSpanColumns / 8;

int spans_of(int columns) { return (columns + kSpanColumns - 1) / kSpanColumns; }

int most_spans(const FlashDecodeSpecialisation& s) {
  return std::max(spans_of(s.head_dim_qk), spans_of(s.head_dim_v));
}

// The most threads of a threadgroup on M1 if each has 128 registers.
constexpr int kMostThreads = 384;

// SIMD groups of a threadgroup that have different keys.
constexpr int kKeySimdgroups = 4;

// With VECTOR_ROWS, where the matrix unit would mostly multiply zeros, each key has 4 lanes or
// more, and a lane sums up units of 8 columns of the values.
constexpr int kUnitColumns = 8;
constexpr int kFewestKeyLanes = 4;

int power_of_2(int64_t at_least) {
  int power = 1;
  while (power < at_least) { power *= 2; }
  return power;
}

}  // namespace

std::span<const DefaultRow<FlashDecodeTile>> FlashDecodeSpecialisation::table() { return kRows; }

TileConditions FlashDecodeSpecialisation::conditions(int family) const {
  // More rows than a tile can have need several passes over the keys.
  TileConditions conditions = Tiled::conditions(family);
  conditions.queries = static_cast<int>(std::min<int64_t>(all_rows, 8 * knobs()[0].maximum));
  return conditions;
}

// Enough lanes that no lane has more sums than with the matrix unit, but no lanes without columns.
int FlashDecodeSpecialisation::key_lanes() const {
  const int units = (head_dim_v + kUnitColumns - 1) / kUnitColumns;
  return std::max(kFewestKeyLanes, std::min(kFewestKeyLanes * vector_rows, power_of_2(units)));
}

int FlashDecodeSpecialisation::column_simdgroups() const {
  return (most_spans(*this) + spans - 1) / spans;
}

int FlashDecodeSpecialisation::key_simdgroups() const {
  return column_simdgroups() > 1 ? 1 : kKeySimdgroups;
}

// The fewest SIMD groups that read the keys no more often than the maximal number of them would.
int FlashDecodeSpecialisation::row_simdgroups() const {
  const int columns = column_simdgroups();
  if (columns == 1 || v_in_k) { return 1; }
  int most = std::max(kMostThreads / (32 * columns), 1);
  while (most > 1 && threadgroup_bytes(most) > THREADGROUP_MEMORY_BYTES) { --most; }
  const int64_t tiles = std::max<int64_t>((all_rows + tile_rows() - 1) / tile_rows(), 1);
  const int64_t tile_passes = (tiles + most - 1) / most;
  return static_cast<int>((tiles + tile_passes - 1) / tile_passes);
}

void FlashDecodeSpecialisation::cut() {
  spans = (most_spans(*this) + column_simdgroups() - 1) / column_simdgroups();
  row_fragments = static_cast<int>(std::clamp<int64_t>((all_rows + 7) / 8, 1, row_fragments));
  vector_rows = vector_rows > 0 ? power_of_2(all_rows) : 0;
  while (features.kv_block() % tile_keys() != 0) { key_fragments /= 2; }
}

bool FlashDecodeSpecialisation::can_run() const {
  return vector_rows == 0 || (vector_rows == power_of_2(all_rows) && row_fragments == 1 &&
                              column_simdgroups() == 1 && !v_in_k);
}

// The arrays of flash_decode.metal. Arrays that a specialisation does not need have one pair.
int FlashDecodeSpecialisation::threadgroup_bytes(int row_groups) const {
  constexpr int kPair = 2;
  constexpr int kFragmentElements = 64;
  const int key_groups = key_simdgroups();
  const int column_groups = column_simdgroups();
  const bool keys_differ = key_groups > 1;
  const auto rows_of = [this](int columns) {
    return spans_of(columns) * row_fragments * kSpanFragments * kFragmentElements;
  };
  const int tiles = key_groups * column_groups * row_groups + (column_groups > 1 ? row_groups : 0);
  const int scores = tiles * 8 * row_fragments * padded(tile_keys());
  const int states = keys_differ ? kPair * key_groups * tile_rows() : kPair;
  const int q_elements = keys_differ ? rows_of(head_dim_qk) : kPair;
  int weights = 1;
  int out = keys_differ ? rows_of(head_dim_v)
            : column_groups > 1 && features.cache.hadamard > 0
                ? row_groups * spans_of(head_dim_v) * kFragmentElements
                : kPair;
  if (vector_rows > 0) {
    const int lane_columns = kUnitColumns * key_lanes();
    weights = key_groups * vector_rows * (tile_keys() + 1);
    out =
        key_groups * vector_rows * ((head_dim_v + lane_columns - 1) / lane_columns * lane_columns);
  }
  const auto group_spans = [column_groups](int columns) {
    return (spans_of(columns) + column_groups - 1) / column_groups;
  };
  const KvFormats& formats = features.cache.formats;
  const bool scaled = kv_span_scaled(int(formats.k)) || kv_span_scaled(int(formats.v));
  const int shared_fragments = column_groups * key_fragments * (kSpanFragments + scaled) *
                               (group_spans(head_dim_qk) + group_spans(head_dim_v));
  const int kv_elements = row_groups > 1 ? shared_fragments * kFragmentElements : kPair;
  int bytes = features.has_tree() ? ARRAY_BYTES(TREE_BYTES) : 0;
  for (const int floats : {scores, weights, out, states}) {
    bytes += ARRAY_BYTES(floats * int(sizeof(float)));
  }
  return bytes + ARRAY_BYTES(q_elements * element_bytes(element)) +
         ARRAY_BYTES(kv_elements * element_bytes(kv_element()));
}

FlashDecodeSpecialisation choose_flash_decode(const FlashFwdProblem& problem, int64_t rows,
                                              bool v_in_k, const Gpu& gpu) {
  auto s = specialisation_for<FlashDecodeSpecialisation>(problem);
  s.v_in_k = v_in_k;
  s.all_rows = rows;
  return default_tile(s, gpu).value();
}

}  // namespace metal_attn
