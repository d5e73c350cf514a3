#include "clock.h"

#include <cstdlib>

namespace metal_attn::simulator {

Owners::~Owners() {
  for (std::atomic<uint32_t*>& chunk : chunks_) free(chunk.load(std::memory_order_relaxed));
}

uint32_t Owners::take(uint32_t threadgroup) {
  uint32_t block = next_.load(std::memory_order_relaxed);
  do {
    if (block == kBlocks) return 0;
  } while (!next_.compare_exchange_weak(block, block + 1, std::memory_order_relaxed));
  const Place place(block);
  std::atomic<uint32_t*>& slot = chunks_[place.chunk];
  uint32_t* chunk = slot.load(std::memory_order_acquire);
  if (!chunk) {
    auto* fresh = static_cast<uint32_t*>(calloc(kFirstChunk << place.chunk, sizeof(uint32_t)));
    if (!fresh) return 0;
    if (slot.compare_exchange_strong(chunk, fresh, std::memory_order_acq_rel))
      chunk = fresh;
    else
      free(fresh);
  }
  chunk[place.index] = threadgroup;
  return block * kBlock;
}

}  // namespace metal_attn::simulator
