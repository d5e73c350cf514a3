#include "lane_map.h"

#include "engine.h"
#include "permutation.h"

namespace metal_attn::simulator {
namespace {

// Of matrices whose map is not known: some permutation, so that no kernel can rely on it.
constexpr uint64_t kUnknown = 0x7E45;

uint32_t element(uint32_t row, uint32_t column) { return row << 16 | column; }

// Both families: a lane has two rows of each 16, this one and the one 8 further.
uint32_t first_row(uint32_t lane) { return (lane >> 2 & 4) | (lane >> 1 & 3); }

// Tiles of 16x16 in row-major order of the stored matrix. A lane has four neighbours of each row.
uint32_t apple10(const TensorMatrix& matrix, uint32_t lane, uint32_t slot) {
  uint32_t tile = slot / 8, in_tile = slot % 8, across = matrix.columns / 16;
  uint32_t first_column = ((lane >> 2 & 2) | (lane & 1)) * 4;
  return element(tile / across * 16 + first_row(lane) + in_tile / 4 * 8,
                 tile % across * 16 + first_column + in_tile % 4);
}

// Tiles of 8x8 in row-major order of the logical matrix, spread as a simdgroup_matrix is.
uint32_t apple9(const TensorMatrix& matrix, uint32_t lane, uint32_t slot) {
  uint32_t across = (matrix.is_transposed ? matrix.rows : matrix.columns) / 8;
  uint32_t tile = slot / 2, first_column = (lane >> 3 & 1) * 4 + (lane & 1) * 2;
  uint32_t row = tile / across * 8 + first_row(lane);
  uint32_t column = tile % across * 8 + first_column + slot % 2;
  return matrix.is_transposed ? element(column, row) : element(row, column);
}

}  // namespace

const __msl_lane_map* LaneMaps::find(const TensorMatrix& matrix) {
  for (const auto& known : known_)
    if (known->matrix == matrix) return &known->map;
  known_.push_back(std::make_unique<Known>());
  Known& known = *known_.back();
  known.matrix = matrix;
  fill(known);
  known.map.element = known.elements.data();
  return &known.map;
}

void LaneMaps::fill(Known& known) const {
  const TensorMatrix& matrix = known.matrix;
  const bool reduces = matrix.operand == MSL_ROWS || matrix.operand == MSL_COLUMNS;
  const bool random = kind_ == LANE_MAP_RANDOM;
  const uint32_t threads = matrix.simdgroups * MSL_SIMD_WIDTH;
  const uint32_t all = matrix.rows * matrix.columns;
  const bool in_tiles = matrix.simdgroups == 1 && matrix.rows % 16 == 0 && matrix.columns % 16 == 0;
  uint32_t& capacity = known.map.capacity;
  capacity = reduces ? all : (all + threads - 1) / threads;
  uint64_t seed = random ? mix(seed_) : kUnknown;
  for (uint32_t part : {matrix.operand, matrix.is_transposed, matrix.rows, matrix.columns})
    seed = mix(seed ^ part);
  for (uint32_t thread = 0; thread < threads; ++thread) {
    for (uint32_t slot = 0; slot < capacity; ++slot) {
      if (!random && in_tiles) {
        auto table = kind_ == LANE_MAP_APPLE10 ? apple10 : apple9;
        known.elements.push_back(table(matrix, thread, slot));
        continue;
      }
      auto place = static_cast<uint32_t>(
          shuffled(thread * capacity + slot, uint64_t{threads} * capacity, seed));
      known.elements.push_back(place < all ? element(place / matrix.columns, place % matrix.columns)
                                           : MSL_NO_ELEMENT);
    }
  }
}

}  // namespace metal_attn::simulator
