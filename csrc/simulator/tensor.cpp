#include <cstring>

#include "worker.h"

namespace metal_attn::simulator {

void begin_tensor(Worker& worker, const __msl_tensor_operation& operation) {
  constexpr uint32_t kScratch = MSL_MOST_LEFT + MSL_MOST_RIGHT + MSL_MOST_DESTINATION;
  const Fiber& fiber = worker.current();
  const Group& group = *fiber.group;
  if (group.full != ~0u)
    worker.fail(fiber, FAULT_TENSOR, fiber.site, kNoSite,
                "tensor operation in SIMD group %u, which has lanes %08x only", fiber.simdgroup,
                group.full);
  if (operation.simdgroups > 1 && operation.simdgroups != worker.group_count)
    worker.fail(fiber, FAULT_TENSOR, fiber.site, kNoSite,
                "tensor operation of execution_simdgroups<%u> in a threadgroup of %u SIMD groups",
                operation.simdgroups, worker.group_count);
  if (worker.scratch) return;
  worker.tensor_memory = std::make_unique_for_overwrite<float[]>(kScratch);
  worker.scratch = worker.tensor_memory.get();
}

void count_tensor(Worker& worker, const __msl_slot& deposit, uint32_t is_further) {
  const __msl_tensor_operation* operation;
  memcpy(&operation, deposit.bytes + 8, sizeof operation);
  worker.counters.tensor_operations += !is_further;
  worker.counters.tensor_multiplications += operation->multiplications;
}

const __msl_lane_map* engine_lane_map(unsigned operand, unsigned is_transposed, unsigned rows,
                                      unsigned columns, unsigned simdgroups) {
  return this_worker().lane_maps.find({operand, is_transposed, rows, columns, simdgroups});
}

}  // namespace metal_attn::simulator
