// How the kernels of softmax are specialised, and their grids.
#pragma once

#include <array>
#include <cstdint>

#include "csrc/ops/common/grid.h"
#include "csrc/problem/softmax.h"
#include "csrc/runtime/launch.h"

namespace metal_attn {

struct SoftmaxSpecialisation {
  Element element;
  int row_simdgroups;
  int threadgroup_rows;
  bool wide_loads;

  uint32_t threads() const {
    return static_cast<uint32_t>(kSimdgroupThreads * row_simdgroups * threadgroup_rows);
  }
  int threadgroup_bytes() const {
    return row_simdgroups > 1 ? 2 * row_simdgroups * static_cast<int>(sizeof(float)) : 0;
  }
  Defines defines() const {
    return {{"ELEMENT", element_name(element)},
            {"ROW_SIMDGROUPS", row_simdgroups},
            {"THREADGROUP_ROWS", threadgroup_rows},
            {"WIDE_LOADS", wide_loads}};
  }
};

SoftmaxSpecialisation choose_softmax(const SoftmaxRows& rows);

std::array<uint32_t, 3> softmax_threadgroups(const SoftmaxRows& rows,
                                             const SoftmaxSpecialisation& specialisation);

}  // namespace metal_attn
