// What is known about each byte of a memory: who wrote and who read it last.
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

// Of each byte and kind of access: the last one, and one that is as far from it as any.
//
// Two are enough: an access that conflicts with any conflicts with one of the two, because whoever
// is ordered after both of them is ordered after all. A plain write is ordered after all others, or
// it is a conflict itself, so its last one is enough.
//
// Bytes that were always accessed together share their entries: a page starts with an entry for 4
// bytes, and gets one for 2 or 1 when the first access needs it.
class Shadow {
 public:
  Shadow() = default;
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;
  ~Shadow();

  // False if there is no memory.
  bool init(uint64_t bytes);
  // As if nothing had been accessed.
  void forget();
  // Records an access to the bytes from `offset`, or says what it conflicts with. Threadgroup
  // memory that the threadgroup has not written is uninitialised.
  ConflictReport access(uint64_t offset, uint32_t bytes, const Access& access);
  // Records it whatever it conflicts with. False if there is no memory.
  bool overwrite(uint64_t offset, uint32_t bytes, const Access& access);

 private:
  struct Page;

  Page* page(uint64_t index);  // null: no memory
  Page* new_page(uint64_t index);
  static Touch* entries(Page& page, Touch** of);
  static bool split(Page& page, uint32_t shift);
  ConflictReport each_page(uint64_t offset, uint32_t bytes, const Access& now, bool checked);
  static ConflictReport access_page(Page& page, uint32_t at, uint32_t bytes, const Access& now,
                                    bool checked);
  static bool is_quiet(const Page& page, uint32_t begin, uint32_t end, const Access& now);
  static ConflictReport check(const Page& page, uint32_t begin, uint32_t end, const Access& now);
  static bool record(Page& page, uint32_t begin, uint32_t end, const Access& now);
  static bool keep_far(Page& page, uint32_t begin, uint32_t end, const Access& now);

  std::atomic<Page*>* pages_ = nullptr;  // each null until accessed
  uint64_t count_ = 0;
};

}  // namespace metal_attn::simulator
