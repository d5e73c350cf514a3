// The order of accesses that barriers impose. An interval is the accesses of a SIMD group between
// two barriers that order the memory. Intervals are numbered from 1. In a threadgroup, numbers
// ascend in the order in which intervals begin.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "../../torch_metal_attn/simulator/shim/abi.h"

namespace metal_attn::simulator {

// A recorded access.
struct Touch {
  static constexpr uint32_t kNoSite = (1u << 22) - 1;

  uint32_t interval;  // 0: there is no access
  uint32_t site : 22;
  uint32_t thread : 10;

  uint32_t simdgroup() const { return thread / MSL_SIMD_WIDTH; }
};

// The memories that barriers order, and their bits in mem_flags.
enum Memory : uint8_t { kThreadgroupMemory, kDeviceMemory, kMemories };
constexpr uint32_t kMemFlags[kMemories] = {2, 1};

// The threadgroup of each interval of device memory. Threadgroups take interval numbers in blocks.
class Owners {
 public:
  static constexpr uint32_t kBlock = 16;

  ~Owners();

  // The first number of a new block; 0 if no block is left.
  uint32_t take(uint32_t threadgroup);
  uint32_t of(uint32_t interval) const {
    const Place place(interval / kBlock);
    return chunks_[place.chunk].load(std::memory_order_relaxed)[place.index];
  }

 private:
  // Each chunk is twice as long as the previous one, so that short runs need little memory.
  static constexpr uint32_t kFirstChunk = 256;
  static constexpr uint32_t kBlocks = 1 << 28;

  struct Place {
    explicit Place(uint32_t block)
        : chunk(std::bit_width(block / kFirstChunk + 1) - 1),
          index(block - kFirstChunk * ((1u << chunk) - 1)) {}
    uint32_t chunk, index;
  };

  std::atomic<uint32_t> next_{1};
  std::atomic<uint32_t*> chunks_[std::bit_width(kBlocks / kFirstChunk)] = {};
};

// The intervals of one memory in a worker. A worker's threadgroup memory has one threadgroup at a
// time. All threadgroups share device memory, and `owners_` has the threadgroup of each interval.
class Clock {
 public:
  void share(Owners* owners) { owners_ = owners; }
  void begin_threadgroup(uint32_t threadgroup) {
    threadgroup_ = threadgroup;
    first_ = epoch_ = last_ + 1;
    if (owners_) end_ = last_;
  }
  // True if interval numbers may run out. Then forget all accesses and start with a new clock.
  bool runs_out() const { return !owners_ && last_ > ~uint32_t{0} / 2; }
  // Orders all earlier accesses of the threadgroup before all later ones.
  void pass_barrier() { epoch_ = last_ + 1; }
  // The number of a new interval; 0 if no number is left.
  uint32_t begin_interval() {
    if (last_ != end_) return ++last_;
    uint32_t first = owners_ ? owners_->take(threadgroup_) : 0;
    if (!first) return 0;
    end_ = first + Owners::kBlock - 1;
    return last_ = first;
  }

  bool shared() const { return owners_ != nullptr; }
  bool foreign(uint32_t interval) const { return owner(interval) != threadgroup_; }
  uint32_t owner(uint32_t interval) const { return owners_ ? owners_->of(interval) : threadgroup_; }
  uint32_t threadgroup() const { return threadgroup_; }
  uint32_t first() const { return first_; }  // the threadgroup's first interval
  uint32_t epoch() const { return epoch_; }  // its first interval after its last barrier
  // Accesses of lower intervals cannot conflict with later accesses.
  uint32_t settled() const { return owners_ ? 1 : epoch_; }

 private:
  Owners* owners_ = nullptr;
  uint32_t threadgroup_ = 0;
  uint32_t first_ = 1;
  uint32_t epoch_ = 1;
  uint32_t last_ = 0;            // the newest interval
  uint32_t end_ = ~uint32_t{0};  // the last number of the current block
};

}  // namespace metal_attn::simulator
