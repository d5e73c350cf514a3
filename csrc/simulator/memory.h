// Device memory of a checked run: a copy of each storage, between guards of inaccessible memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine.h"
#include "shadow.h"

namespace metal_attn::simulator {

// Reserved address space. Pages take no memory until they are accessed.
struct Reservation {
  Reservation() = default;
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  ~Reservation();

  // False if the system refuses. `alignment` is a power of two, at least a page.
  bool reserve(size_t size, size_t alignment);
  static bool allow_access(char* begin, size_t size);

  char* data = nullptr;
  size_t bytes = 0;
};

// A storage. Arguments whose storages overlap share a slot.
struct Slot {
  char* guard_begin;  // faults in [guard_begin, guard_end) are attributed to this storage
  char* guard_end;
  char* begin;
  char* source;  // the original storage
  uint64_t bytes;
  uint8_t* initialised;  // the marks of SimulatorBuffer
  Shadow* shadow;        // null unless writable
  uint32_t index;        // of one argument in this storage
  uint32_t space;
  bool writable;
};

class GuardedMemory {
 public:
  // False if there is too little address space or memory.
  bool copy_in(const SimulatorBuffer* buffers, uint32_t count);
  void copy_out();  // writes changed bytes only
  // The kernel's address of an argument.
  char* address(const SimulatorBuffer& buffer) const;
  const Slot* find(const char* address) const {
    for (uint32_t i = 0; i < count_; ++i)
      if (address >= slots_[i].guard_begin && address < slots_[i].guard_end) return &slots_[i];
    return nullptr;
  }

 private:
  Reservation reservation_;
  Slot slots_[SIMULATOR_MAX_ARGUMENTS];
  Shadow shadows_[SIMULATOR_MAX_ARGUMENTS];
  uint32_t count_ = 0;
};

}  // namespace metal_attn::simulator
