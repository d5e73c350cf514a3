// Tensor operations: what is checked before the threads meet, and counted afterwards.
#pragma once

#include <cstdint>

#include "worker.h"

namespace metal_attn::simulator {

// Fails if the running thread's scope is not whole. `scratch` has memory from here on.
void begin_tensor(Worker& worker, const __msl_tensor_operation& operation);

// deposit: any thread's, which has the operation's address. is_further: it was counted before.
void count_tensor(Worker& worker, const __msl_slot& deposit, uint32_t is_further);

const __msl_lane_map* engine_lane_map(unsigned operand, unsigned is_transposed, unsigned rows,
                                      unsigned columns, unsigned simdgroups);

}  // namespace metal_attn::simulator
