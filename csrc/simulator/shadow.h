// For each byte of a memory, which threads wrote and read it last.
#pragma once

#include <atomic>
#include <cstdint>

#include "clock.h"
#include "fence.h"

namespace metal_attn::simulator {

// Kinds of accesses; their bits.
enum AccessKind : uint8_t { kRead = 0, kWrite = 1, kAtomic = 2, kAccessKinds = 4 };

struct Access {
  Touch touch;
  uint32_t since;  // what its SIMD group did in earlier intervals is ordered before it
  uint8_t kind;
  bool reads;  // a read, or an atomic write that reads what it replaces
  Memory memory;
  const Clock& clock;
  const Fences* known;  // null: none
};

enum class Conflict : uint8_t { kNone, kUninitialised, kRace, kNoMemory };

struct ConflictReport {
  Conflict kind;
  uint32_t byte;  // of the access
  Touch other;
  uint8_t other_kind;
};

constexpr uint32_t kShadowPageBytes = 1024;

// The entries of each kind of access in a page of memory; null until there is one.
struct ShadowPage {
  std::atomic<bool> held{false};
  uint8_t shift = 4;  // log2 of an entry's bytes
  Touch* last[kAccessKinds] = {};
  Touch* far[kAccessKinds] = {};

  ~ShadowPage();
};

// For each byte and kind of access it keeps two accesses: the last one, and one by a thread as far
// from the last one's as any (another lane, SIMD group or threadgroup).
//
// Two are enough: an access that is ordered after both of them is ordered after all, so a conflict
// with any is a conflict with one of the two. Of plain writes the last is enough: it is ordered
// after all others, or is a conflict itself.
//
// Bytes that were always accessed together share their entries: a page starts with an entry for 16
// bytes, and gets one for 8, 4, 2 or 1 when the first access needs it.
class Shadow {
 public:
  Shadow() = default;
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;
  ~Shadow();

  // False if there is no memory.
  bool init(uint64_t bytes);
  // Forgets all accesses.
  void forget();
  // Records an access to the bytes from `offset`, or says what it conflicts with. Threadgroup
  // memory that the threadgroup has not written is uninitialised. Unchecked it conflicts with
  // nothing.
  ConflictReport access(uint64_t offset, uint32_t bytes, const Access& access, bool checked = true);
  // A fast path of `access` for the most common case: no fences, whole entries, and no conflicting
  // access since the last barrier. False if the case does not apply or may not apply.
  bool access_settled(uint32_t offset, uint32_t bytes, bool write, const Touch& now, uint32_t since,
                      const Clock& clock);

 private:
  ShadowPage* page(uint64_t index);  // null: no memory
  ShadowPage* new_page(uint64_t index);

  std::atomic<ShadowPage*>* pages_ = nullptr;  // each null until accessed
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
  // All that was written by this threadgroup before the barrier.
  uint32_t first = clock.first(), epoch = settled - first;
  for (uint32_t i = begin; i < end; ++i)
    if (written[i].interval - first >= epoch) return false;
  for (uint32_t i = begin; i < end; ++i) {
    // The rule of keep_far: the last access becomes the far one if it is at least as far from this
    // access as the far one is.
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
