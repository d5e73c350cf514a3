#include "lane_map.h"

#include "engine.h"
#include "permutation.h"

namespace metal_attn::simulator {
namespace {

// The seed that permutes matrices whose layout is unknown, so that no kernel relies on a layout.
constexpr uint64_t kUnknown = 0x7E45;

uint32_t element(uint32_t row, uint32_t column) { return row << 16 | column; }

// In both families a lane has two of every 16 rows: this row, and the row 8 below it.
uint32_t first_row(uint32_t lane) { return (lane >> 2 & 4) | (lane >> 1 & 3); }

// Tiles of 16x16 in row-major order of the stored matrix. A lane has four columns of each row.
uint32_t first_column_apple10(uint32_t lane) { return ((lane >> 2 & 2) | (lane & 1)) * 4; }
uint32_t apple10(const TensorMatrix& matrix, uint32_t lane, uint32_t slot) {
  uint32_t tile = slot / 8, in_tile = slot % 8, across = matrix.columns / 16;
  return element(tile / across * 16 + first_row(lane) + in_tile / 4 * 8,
                 tile % across * 16 + first_column_apple10(lane) + in_tile % 4);
}

// Tiles of 8x8 in row-major order of the logical matrix, laid out as a simdgroup_matrix.
uint32_t first_column_apple9(uint32_t lane) { return (lane >> 3 & 1) * 4 + (lane & 1) * 2; }
uint32_t apple9(const TensorMatrix& matrix, uint32_t lane, uint32_t slot) {
  uint32_t across = (matrix.is_transposed ? matrix.rows : matrix.columns) / 8, tile = slot / 2;
  uint32_t row = tile / across * 8 + first_row(lane);
  uint32_t column = tile % across * 8 + first_column_apple9(lane) + slot % 2;
  return matrix.is_transposed ? element(column, row) : element(row, column);
}

// The matrix of a reduction over rows or columns: the rows or columns of the lane's elements.
uint32_t reduced(bool is_apple10, const TensorMatrix& matrix, uint32_t lane, uint32_t slot) {
  if (matrix.operand == MSL_ROWS) return element(first_row(lane) + slot * 8, 0);
  return is_apple10 ? element(0, slot / 4 * 16 + first_column_apple10(lane) + slot % 4)
                    : element(0, slot / 2 * 8 + first_column_apple9(lane) + slot % 2);
}

}  // namespace

const __msl_lane_map* LaneMaps::find(const TensorMatrix& matrix) {
  for (const auto& known : all)
    if (known->matrix == matrix) return &known->map;
  KnownLaneMap& added = *all.emplace_back(std::make_unique<KnownLaneMap>());
  added.matrix = matrix;
  const uint32_t threads = matrix.simdgroups * MSL_SIMD_WIDTH;
  const uint32_t size = matrix.rows * matrix.columns;
  const bool reduces = matrix.operand == MSL_ROWS || matrix.operand == MSL_COLUMNS;
  const bool is_apple10 = kind == LANE_MAP_APPLE10;
  // A reduction's matrix is one column or one row.
  const bool in_tiles = (matrix.operand == MSL_COLUMNS || matrix.rows % 16 == 0) &&
                        (matrix.operand == MSL_ROWS || matrix.columns % 16 == 0);
  const bool is_known = kind != LANE_MAP_RANDOM && matrix.simdgroups == 1 && in_tiles;
  uint32_t& capacity = added.map.capacity;
  if (!reduces)
    capacity = (size + threads - 1) / threads;
  else  // every lane has all elements, unless the layout is known
    capacity = !is_known ? size : matrix.operand == MSL_ROWS ? size / 8 : size / 4;
  uint64_t order = kind == LANE_MAP_RANDOM ? mix(seed) : kUnknown;
  for (uint32_t part : {matrix.operand, matrix.is_transposed, matrix.rows, matrix.columns})
    order = mix(order ^ part);
  for (uint32_t thread = 0; thread < threads; ++thread) {
    for (uint32_t slot = 0; slot < capacity; ++slot) {
      uint32_t place;
      if (is_known && reduces) {
        place = reduced(is_apple10, matrix, thread, slot);
      } else if (is_known) {
        place = (is_apple10 ? apple10 : apple9)(matrix, thread, slot);
      } else {
        uint64_t slots = uint64_t{threads} * capacity;
        auto at = static_cast<uint32_t>(reduces ? slot
                                                : shuffled(thread * capacity + slot, slots, order));
        place = at < size ? element(at / matrix.columns, at % matrix.columns) : MSL_NO_ELEMENT;
      }
      added.elements.push_back(place);
    }
  }
  added.map.elements = added.elements.data();
  return &added.map;
}

}  // namespace metal_attn::simulator
