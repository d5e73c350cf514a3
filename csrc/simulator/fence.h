// The order of accesses that fences impose. Metal's atomic operations are relaxed, and order no
// other access. But if thread A passes a fence and then writes an atomic, and thread B reads that
// value and then passes a fence, A's accesses before its fence happen before B's accesses after its
// fence.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "clock.h"

namespace metal_attn::simulator {

// A thread's fence, and the accesses that happen before it: the thread's, and those that barriers
// have ordered before them. Intervals are 0 for a memory that the fence does not order.
struct Fence {
  uint32_t threadgroup;
  uint16_t thread;
  bool local;                 // its scope is within the threadgroup
  uint32_t last[kMemories];   // the last interval of the thread before the fence
  uint32_t since[kMemories];  // the first interval of its SIMD group that is not before the fence
  uint32_t epoch[kMemories];  // the first interval of its threadgroup that is not before the fence

  bool covers(const Touch& touch, Memory memory) const {
    if (touch.thread == thread && touch.interval <= last[memory]) return true;
    return touch.interval < (touch.simdgroup() == thread / MSL_SIMD_WIDTH ? since : epoch)[memory];
  }
};

// One fence for each thread, sorted by threadgroup and thread. Threads share equal lists.
using Fences = std::vector<Fence>;
using Knowledge = std::shared_ptr<const Fences>;

// True if an access by `threadgroup` happens before a fence in `known`, for threadgroup `here`.
bool covers(const Fences& known, uint32_t threadgroup, uint32_t here, const Touch& touch,
            Memory memory);

// The fences that a thread knows.
struct Order {
  Knowledge known;      // they happen before the thread's next access
  Knowledge published;  // its atomic writes publish them
  Knowledge seen;       // its atomic reads received them; they become known at its next fence

  void pass_fence(const Fence& fence);
  void see(const Knowledge& message);
};

// Threads at a barrier share the fences that they have seen and, if the barrier orders device
// memory, those that they know and publish. If each of them has passed a fence, the barrier of a
// whole threadgroup is also a fence, `together`.
void pass_barrier(Order* orders, uint32_t count, bool orders_device, const Fence* together);

// The fences that atomic writes publish, shared by all workers.
class Messages {
 public:
  // False if there are no fences.
  bool any() const { return any_.load(std::memory_order_acquire); }
  void expect() { any_.store(true, std::memory_order_release); }
  // Call it before an atomic write. An update keeps the fences that the memory has.
  void publish(const void* address, const Knowledge& published, bool update);
  // Call it after an atomic read.
  Knowledge at(const void* address);

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::unordered_map<const void*, Knowledge> at_;
};

}  // namespace metal_attn::simulator
