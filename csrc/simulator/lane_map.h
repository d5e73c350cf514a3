// Which element of a matrix each lane of a tensor operation keeps in each slot.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../../torch_metal_attn/simulator/shim/abi.h"

namespace metal_attn::simulator {

// The stored matrix of a tensor operation.
struct TensorMatrix {
  uint32_t operand;  // an __msl_operand
  uint32_t is_transposed;
  uint32_t rows, columns;
  uint32_t simdgroups;

  bool operator==(const TensorMatrix&) const = default;
};

struct KnownLaneMap {
  TensorMatrix matrix;
  std::vector<unsigned> elements;
  __msl_lane_map map;
};

// The lane maps of one run. Each is computed when it is first needed.
struct LaneMaps {
  const __msl_lane_map* find(const TensorMatrix& matrix);

  uint32_t kind = 0;  // a SimulatorLaneMap
  uint64_t seed = 0;
  std::vector<std::unique_ptr<KnownLaneMap>> all = {};
};

}  // namespace metal_attn::simulator
