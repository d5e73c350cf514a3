#include "fence.h"

#include <algorithm>
#include <new>
#include <tuple>

#include "worker.h"

namespace metal_attn::simulator {
namespace {

bool before(const Fence& a, const Fence& b) {
  return std::tie(a.threadgroup, a.thread) < std::tie(b.threadgroup, b.thread);
}

// The merge of two fences of one thread.
Fence later(const Fence& a, const Fence& b) {
  Fence both = a;
  both.local = a.local && b.local;
  for (uint32_t memory = 0; memory < kMemories; ++memory) {
    both.last[memory] = std::max(a.last[memory], b.last[memory]);
    both.since[memory] = std::max(a.since[memory], b.since[memory]);
    both.epoch[memory] = std::max(a.epoch[memory], b.epoch[memory]);
  }
  return both;
}

Knowledge both(const Knowledge& a, const Knowledge& b) {
  if (!a || a == b) return b;
  if (!b) return a;
  auto all = std::make_shared<Fences>();
  all->reserve(a->size() + b->size());
  auto i = a->begin(), j = b->begin();
  while (i != a->end() && j != b->end()) {
    if (before(*i, *j))
      all->push_back(*i++);
    else if (before(*j, *i))
      all->push_back(*j++);
    else
      all->push_back(later(*i++, *j++));
  }
  all->insert(all->end(), i, a->end());
  all->insert(all->end(), j, b->end());
  return all;
}

Knowledge only(const Fence& fence) { return std::make_shared<Fences>(1, fence); }

// The fences of the threadgroup, or if not `inside`, the fences of all other threadgroups.
Knowledge of_threadgroup(const Knowledge& known, uint32_t threadgroup, bool inside) {
  if (!known) return known;
  auto some = std::make_shared<Fences>();
  for (const Fence& fence : *known)
    if ((fence.threadgroup == threadgroup) == inside) some->push_back(fence);
  return some;
}

}  // namespace

bool covers(const Fences& known, uint32_t threadgroup, uint32_t here, const Touch& touch,
            Memory memory) {
  Fence first{};
  first.threadgroup = threadgroup;
  for (auto fence = std::lower_bound(known.begin(), known.end(), first, before);
       fence != known.end() && fence->threadgroup == threadgroup; ++fence)
    if ((!fence->local || threadgroup == here) && fence->covers(touch, memory)) return true;
  return false;
}

void Order::pass_fence(const Fence& fence) {
  known = both(known, fence.local ? of_threadgroup(seen, fence.threadgroup, true) : seen);
  published = both(published, both(known, only(fence)));
}

void Order::see(const Knowledge& message) { seen = both(seen, message); }

void pass_barrier(Order* orders, uint32_t count, bool orders_device, const Fence* together) {
  Order all;
  bool all_fenced = true;
  for (uint32_t i = 0; i < count; ++i) {
    all.seen = both(all.seen, orders[i].seen);
    all.known = both(all.known, orders[i].known);
    all.published = both(all.published, orders[i].published);
    all_fenced &= orders[i].published != nullptr;
  }
  if (together && all_fenced)
    all.published =
        both(of_threadgroup(all.published, together->threadgroup, false), only(*together));
  for (uint32_t i = 0; i < count; ++i) {
    orders[i].seen = all.seen;
    if (!orders_device) continue;
    orders[i].known = all.known;
    orders[i].published = all.published;
  }
}

void Messages::publish(const void* address, const Knowledge& published, bool update) {
  std::lock_guard<std::mutex> lock(mutex_);
  Knowledge& here = at_[address];
  here = update ? both(here, published) : published;
}

Knowledge Messages::at(const void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto entry = at_.find(address);
  return entry == at_.end() ? nullptr : entry->second;
}

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
