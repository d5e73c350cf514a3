// The order of accesses that fences impose. Metal's atomic operations are relaxed and do not order
// other accesses. But if thread A passes a fence and then writes an atomic, and thread B reads that
// value and passes a fence, A's accesses before A's fence precede B's accesses after B's fence.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "clock.h"

namespace metal_attn::simulator {

// A thread's fence. The thread's earlier accesses happen before it, and so do all accesses that
// barriers have ordered before these. Intervals are 0 for a memory that the fence does not order.
struct Fence {
  uint32_t threadgroup;
  uint16_t thread;
  bool local;                 // true if the fence orders accesses in the threadgroup only
  uint32_t last[kMemories];   // the thread's last interval before the fence
  uint32_t since[kMemories];  // the SIMD group's first interval that is not before the fence
  uint32_t epoch[kMemories];  // the threadgroup's first interval that is not before the fence

  bool covers(const Touch& touch, Memory memory) const {
    if (touch.thread == thread && touch.interval <= last[memory]) return true;
    return touch.interval < (touch.simdgroup() == thread / MSL_SIMD_WIDTH ? since : epoch)[memory];
  }
};

// One fence for each thread, sorted by threadgroup and thread. Threads share equal lists.
using Fences = std::vector<Fence>;
using Knowledge = std::shared_ptr<const Fences>;

// True if an access by `threadgroup` happens before a fence in `known` that holds for `here`.
bool covers(const Fences& known, uint32_t threadgroup, uint32_t here, const Touch& touch,
            Memory memory);

// The fences that a thread knows.
struct Order {
  Knowledge known;      // fences that happen before the thread's next access
  Knowledge published;  // fences that the thread's atomic writes publish
  Knowledge seen;  // fences that its atomic reads have received; its next fence makes them known

  void pass_fence(const Fence& fence);
  void see(const Knowledge& message);
};

// Threads at a barrier share the fences that they have seen and, if the barrier orders device
// memory, the fences that they know and publish. If each thread has passed a fence, the barrier is
// also the fence `together`, unless that is null.
void pass_barrier(Order* orders, uint32_t count, bool orders_device, const Fence* together);

// The fences that atomic writes publish, shared by all workers.
class Messages {
 public:
  // False if no thread has passed a fence.
  bool any() const { return any_.load(std::memory_order_acquire); }
  void expect() { any_.store(true, std::memory_order_release); }
  // Call it before an atomic write. An update keeps the fences that were published at the address.
  void publish(const void* address, const Knowledge& published, bool update);
  // Call it after an atomic read.
  Knowledge at(const void* address);

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::unordered_map<const void*, Knowledge> at_;
};

}  // namespace metal_attn::simulator
