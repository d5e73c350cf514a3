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

// The lane maps of one run, which are made when they are first needed.
class LaneMaps {
 public:
  void choose(uint32_t kind, uint64_t seed) {  // kind: a SimulatorLaneMap
    kind_ = kind;
    seed_ = seed;
  }
  const __msl_lane_map* find(const TensorMatrix& matrix);

 private:
  struct Known {
    TensorMatrix matrix;
    std::vector<unsigned> elements;
    __msl_lane_map map;
  };

  uint32_t kind_ = 0;
  uint64_t seed_ = 0;
  std::vector<std::unique_ptr<Known>> known_;
};

}  // namespace metal_attn::simulator
