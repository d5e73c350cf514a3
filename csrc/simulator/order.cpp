// The order of accesses that a worker's barriers and fences impose.
#include <algorithm>
#include <new>

#include "worker.h"

namespace metal_attn::simulator {

uint32_t Worker::begin_interval(Memory memory) {
  uint32_t interval = clocks[memory].begin_interval();
  if (!interval) give_up("the run is too long to be checked for races");
  return interval;
}

void Worker::pass_fence(uint32_t flags, bool local) try {
  Fiber& fiber = current();
  Fence fence{};
  fence.threadgroup = clocks[kDeviceMemory].threadgroup();
  fence.thread = static_cast<uint16_t>(fiber.index);
  fence.local = local;
  for (Memory memory : {kThreadgroupMemory, kDeviceMemory}) {
    if (!(flags & kMemFlags[memory])) continue;
    fence.since[memory] = interval(*fiber.group, memory);
    fence.last[memory] = std::max(fence.since[memory], fiber.after_fence[memory]);
    fence.epoch[memory] = clocks[memory].epoch();
    fiber.after_fence[memory] = begin_interval(memory);
  }
  if (!orders) orders = std::make_unique<Order[]>(kMaxThreads);
  orders[fiber.index].pass_fence(fence);
  run->messages.expect();
} catch (const std::bad_alloc&) { give_up(kNoMemory); }

void Worker::publish(const void* address, bool update) try {
  run->messages.publish(address, orders ? orders[current().index].published : nullptr, update);
} catch (const std::bad_alloc&) { give_up(kNoMemory); }

void Worker::observe(const void* address) try {
  const Knowledge message = run->messages.at(address);
  if (!message) return;
  if (!orders) orders = std::make_unique<Order[]>(kMaxThreads);
  orders[current().index].see(message);
} catch (const std::bad_alloc&) { give_up(kNoMemory); }

void Worker::share_order(uint32_t flags) try {
  Fence together{};
  together.threadgroup = clocks[kDeviceMemory].threadgroup();
  for (Memory memory : {kThreadgroupMemory, kDeviceMemory})
    if (flags & kMemFlags[memory])
      together.since[memory] = together.epoch[memory] = clocks[memory].epoch();
  bool orders_device = flags & kMemFlags[kDeviceMemory];
  pass_barrier(orders.get(), threads, orders_device, orders_device ? &together : nullptr);
} catch (const std::bad_alloc&) { give_up(kNoMemory); }

void Worker::share_order(Group& group, uint32_t flags) try {
  uint32_t lanes = static_cast<uint32_t>(__builtin_popcount(group.full));
  pass_barrier(&orders[group.lanes->index], lanes, flags & kMemFlags[kDeviceMemory], nullptr);
} catch (const std::bad_alloc&) { give_up(kNoMemory); }

}  // namespace metal_attn::simulator
