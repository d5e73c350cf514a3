// The order that fences impose. Metal's atomic operations are relaxed: alone they order no other
// access. If thread A passes a fence and then writes an atomic, and thread B reads that value and
// then passes a fence, A's accesses before its fence happen before B's accesses after its fence.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "clock.h"

namespace metal_attn::simulator {

// A fence of a thread, and which accesses happen before it: the thread's own, and those that
// barriers had ordered before them. An interval of 0 covers no access: the fence does not order
// that memory.
struct Fence {
  uint32_t threadgroup;
  uint16_t thread;
  bool local;                 // of a scope within the threadgroup
  uint32_t last[kMemories];   // the last interval of the thread's own accesses before the fence
  uint32_t since[kMemories];  // the first interval of its SIMD group that is not before the fence
  uint32_t epoch[kMemories];  // the first interval of its threadgroup that is not before the fence

  bool covers(const Touch& touch, Memory memory) const {
    if (touch.thread == thread && touch.interval <= last[memory]) return true;
    return touch.interval < (touch.simdgroup() == thread / MSL_SIMD_WIDTH ? since : epoch)[memory];
  }
};

// Sorted by threadgroup and thread, one fence of each. Shared by those that know the same.
using Fences = std::vector<Fence>;
using Knowledge = std::shared_ptr<const Fences>;

// True if an access by `threadgroup` happens before a fence in `known`. `here`: the threadgroup
// that asks.
bool covers(const Fences& known, uint32_t threadgroup, uint32_t here, const Touch& touch,
            Memory memory);

// The fences of other threads that a thread knows.
struct Order {
  Knowledge known;      // happen before the thread's next access
  Knowledge published;  // its atomic writes pass these on
  Knowledge seen;       // its atomic reads received these; they are known after its next fence

  void pass_fence(const Fence& fence);
  void see(const Knowledge& message);
};

// Threads that meet at a barrier share the fences that they have seen and, if the barrier orders
// device memory, those that they know and publish. If each of them has passed a fence, the barrier
// of a whole threadgroup is a fence too: `together`.
void pass_barrier(Order* orders, uint32_t count, bool orders_device, const Fence* together);

// The fences that atomic memory passes on, shared by all workers.
class Messages {
 public:
  // Without fences there is nothing to pass on.
  bool any() const { return any_.load(std::memory_order_acquire); }
  void expect() { any_.store(true, std::memory_order_release); }
  // Before an atomic write. An update passes on what the memory had as well.
  void publish(const void* address, const Knowledge& published, bool update);
  // After an atomic read.
  Knowledge at(const void* address);

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::unordered_map<const void*, Knowledge> at_;
};

}  // namespace metal_attn::simulator
