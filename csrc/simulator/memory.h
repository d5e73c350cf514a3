// Device memory of a checked run: each storage copied to a place of its own, with nothing near it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine.h"
#include "shadow.h"

namespace metal_attn::simulator {

// Address space taken from the system, given back at the end of its life. Pages cost nothing until
// touched.
class Reservation {
 public:
  Reservation() = default;
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  ~Reservation();

  // False if the system refuses. `alignment` is a power of two, at least a page.
  bool reserve(size_t bytes, size_t alignment);
  bool allow_access(char* begin, size_t bytes);
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// One storage. Arguments whose storages overlap share one.
struct Slot {
  char* guard_begin;  // an address in [guard_begin, guard_end) was computed from this storage
  char* guard_end;
  char* begin;
  char* source;
  uint64_t bytes;
  uint8_t* initialised;  // SimulatorBuffer's
  Shadow* shadow;        // null unless writable
  uint32_t index;        // an argument that has it
  uint32_t space;
  bool writable;
};

class GuardedMemory {
 public:
  // Copies the storages in. False if there is no address space or memory for them.
  bool copy_in(const SimulatorBuffer* buffers, uint32_t count);
  // Copies what changed back.
  void copy_out();
  // The address that the kernel gets for an argument.
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
