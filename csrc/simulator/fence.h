// What fences order. Metal's atomic operations are relaxed: they order nothing but themselves. A
// fence before an atomic write and a fence after an atomic read that sees it order what the one
// thread did before its fence before what the other does after its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "clock.h"

namespace metal_attn::simulator {

// A thread's fence: what it had done, and what barriers had ordered before. An interval of 0 covers
// nothing, as for a memory that the fence does not order.
struct Fence {
  uint32_t threadgroup;
  uint16_t thread;
  bool local;                 // of a scope within the threadgroup
  uint32_t last[kMemories];   // of the thread's own accesses, the last interval before the fence
  uint32_t since[kMemories];  // of its SIMD group's, the first that is not ordered before it
  uint32_t epoch[kMemories];  // and of its threadgroup's

  bool covers(const Touch& touch, Memory memory) const {
    if (touch.thread == thread && touch.interval <= last[memory]) return true;
    return touch.interval < (touch.simdgroup() == thread / MSL_SIMD_WIDTH ? since : epoch)[memory];
  }
};

// Sorted by threadgroup and thread, one fence of each. Shared by those that know the same.
using Fences = std::vector<Fence>;
using Knowledge = std::shared_ptr<const Fences>;

// Whether a fence in `known` comes after an access of `threadgroup`. `here`: the asking one.
bool covers(const Fences& known, uint32_t threadgroup, uint32_t here, const Touch& touch,
            Memory memory);

// What a thread knows of others.
struct Order {
  Knowledge known;      // it is ordered before what the thread does now
  Knowledge published;  // what its atomic writes pass on
  Knowledge seen;       // what its atomic reads have got; known after the next fence

  void pass_fence(const Fence& fence);
  void see(const Knowledge& message);
};

// The threads of a barrier share what they have seen; if it orders device memory, all that they
// know. A barrier of the whole threadgroup after a fence of each thread counts as a fence,
// `together`.
void pass_barrier(Order* orders, uint32_t count, bool orders_device, const Fence* together);

// What atomic memory passes on, of all workers.
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
