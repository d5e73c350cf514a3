// The last accesses to each byte of a memory.
#pragma once

#include <atomic>
#include <cstdint>

#include "clock.h"
#include "fence.h"

namespace metal_attn::simulator {

// The bits of a kind of access.
enum AccessKind : uint8_t { kRead = 0, kWrite = 1, kAtomic = 2, kAccessKinds = 4 };

struct Access {
  Touch touch;
  uint32_t since;  // earlier intervals of the same SIMD group are ordered before this access
  uint8_t kind;
  bool reads;  // true for reads and for atomic updates
  Memory memory;
  const Clock& clock;
  const Fences* known;  // the fences that the thread knows; null if there are none
};

enum class Conflict : uint8_t { kNone, kUninitialised, kRace, kNoMemory };

struct ConflictReport {
  Conflict kind;
  uint32_t byte;  // the first byte of the access that conflicts
  Touch other;
  uint8_t other_kind;
};

constexpr uint32_t kShadowPageBytes = 1024;

// The entries of a page of memory for each kind of access; null until the first such access.
struct ShadowPage {
  std::atomic<bool> held{false};
  uint8_t shift = 4;  // log2 of an entry's bytes
  Touch* last[kAccessKinds] = {};
  Touch* far[kAccessKinds] = {};

  ~ShadowPage();
};

// Records two accesses for each byte and kind of access: the last access, and the far access, whose
// thread is farthest from that of the last access (another lane, SIMD group or threadgroup).
//
// Two accesses suffice: an access that is ordered after both is ordered after all. For plain writes
// the last access suffices: it is ordered after all others, or is itself a conflict.
//
// An entry covers 16 bytes. An access to a part of them splits the page into smaller entries.
class Shadow {
 public:
  Shadow() = default;
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;
  ~Shadow();

  bool init(uint64_t bytes);  // false if there is too little memory
  void forget();              // forgets all accesses
  // Records an access to the bytes from `offset` on, or returns its conflict. Threadgroup memory is
  // uninitialised until the threadgroup writes it. If not `checked`, nothing conflicts.
  ConflictReport access(uint64_t offset, uint32_t bytes, const Access& access, bool checked = true);
  // A fast path of `access` if there are no fences. Returns false and records nothing if the access
  // may be to a part of an entry, or may conflict with an access since the last barrier.
  bool access_settled(uint32_t offset, uint32_t bytes, bool write, const Touch& now, uint32_t since,
                      const Clock& clock);

 private:
  ShadowPage* page(uint64_t index);  // null if there is too little memory

  std::atomic<ShadowPage*>* pages_ = nullptr;  // a page is null until its first access
  uint64_t count_ = 0;
};

inline bool Shadow::access_settled(uint32_t offset, uint32_t bytes, bool write, const Touch& now,
                                   uint32_t since, const Clock& clock) {
  uint32_t at = offset % kShadowPageBytes;
  ShadowPage* page = pages_[offset / kShadowPageBytes].load(std::memory_order_relaxed);
  if (!page || (at | bytes) & ((1u << page->shift) - 1) || at + bytes > kShadowPageBytes)
    return false;
  uint32_t begin = at >> page->shift, end = (at + bytes) >> page->shift, settled = clock.settled();
  Touch *written = page->last[kWrite], *read = page->last[kRead], *far_read = page->far[kRead];
  if (!written || page->last[kAtomic] || page->last[kAtomic | kWrite]) return false;
  if (write) {
    for (uint32_t i = begin; i < end; ++i)
      if (written[i].interval >= settled || (read && read[i].interval >= settled)) return false;
    for (uint32_t i = begin; i < end; ++i) written[i] = now;
    return true;
  }
  if (!read) return false;
  // This threadgroup must have written the bytes before the last barrier.
  uint32_t first = clock.first(), epoch = settled - first;
  for (uint32_t i = begin; i < end; ++i)
    if (written[i].interval - first >= epoch) return false;
  for (uint32_t i = begin; i < end; ++i) {
    // As in keep_far, the last access becomes the far one if it is at least as far.
    bool other_group = read[i].simdgroup() != now.simdgroup();
    if (read[i].interval >= (other_group ? settled : since) && read[i].thread != now.thread) {
      if (!far_read) return false;
      const Touch& far = far_read[i];
      if (other_group || far.interval < settled || far.simdgroup() == now.simdgroup())
        far_read[i] = read[i];
    }
    read[i] = now;
  }
  return true;
}

}  // namespace metal_attn::simulator
