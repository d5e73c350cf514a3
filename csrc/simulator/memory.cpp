#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>

namespace metal_attn::simulator {
namespace {

// Bytes before and after a storage, so that no 32-bit index reaches another storage. An int index
// is at least -2^31, a uint index is below 2^32, and elements have up to 16 bytes. If there is too
// little address space, the second guard suffices for int indices of single bytes only.
struct Guard {
  uint64_t before, after;
};
constexpr Guard kGuards[] = {{uint64_t{1} << 35, uint64_t{1} << 36},
                             {uint64_t{1} << 31, uint64_t{1} << 31}};
constexpr uint64_t kChunkBytes = 4096;
constexpr uint64_t kAlignment = 1 << 16;  // a multiple of the page size of all hosts

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Reservation::~Reservation() {
  if (data) munmap(data, bytes);
}

bool Reservation::reserve(size_t size, size_t alignment) {
  bytes = round_up(size, static_cast<size_t>(sysconf(_SC_PAGESIZE)));
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = mmap(nullptr, bytes + alignment, PROT_NONE, flags, -1, 0);
  if (mapped == MAP_FAILED) return false;
  char* base = static_cast<char*>(mapped);
  data = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(base), alignment));
  if (data != base) munmap(base, data - base);
  munmap(data + bytes, base + alignment - data);
  return true;
}

bool Reservation::allow_access(char* begin, size_t size) {
  return size == 0 || mprotect(begin, size, PROT_READ | PROT_WRITE) == 0;
}

bool GuardedMemory::copy_in(const SimulatorBuffer* buffers, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    char* storage = static_cast<char*>(buffers[i].storage);
    slots_[i] = {nullptr,          nullptr,
                 nullptr,          storage,
                 buffers[i].bytes, buffers[i].initialised,
                 nullptr,          buffers[i].index,
                 buffers[i].space, buffers[i].writable != 0};
  }
  std::sort(slots_, slots_ + count,
            [](const Slot& a, const Slot& b) { return a.source < b.source; });
  count_ = 0;
  for (uint32_t i = 0; i < count; ++i) {
    Slot* last = count_ ? &slots_[count_ - 1] : nullptr;
    if (last && slots_[i].bytes && slots_[i].source < last->source + last->bytes) {
      uint64_t end =
          std::max(last->source + last->bytes, slots_[i].source + slots_[i].bytes) - last->source;
      // Different storages that overlap have no table of initialised bytes.
      if (slots_[i].source != last->source || slots_[i].bytes != end) last->initialised = nullptr;
      last->bytes = end;
      last->writable |= slots_[i].writable;
      if (slots_[i].space == SPACE_DEVICE) last->space = SPACE_DEVICE;
    } else {
      slots_[count_++] = slots_[i];
    }
  }

  if (count_ == 0) return true;
  uint64_t total = 0;
  for (uint32_t i = 0; i < count_; ++i) total += round_up(slots_[i].bytes, kAlignment);
  const Guard* guard = kGuards;
  while (!reservation_.reserve(total + count_ * (guard->before + guard->after), kAlignment))
    if (++guard == std::end(kGuards)) return false;
  char* cursor = reservation_.data;
  static const char zeros[kChunkBytes] = {};
  for (uint32_t i = 0; i < count_; ++i) {
    Slot& slot = slots_[i];
    uint64_t room = round_up(slot.bytes, kAlignment);
    slot.guard_begin = cursor;
    slot.begin = cursor + guard->before;
    slot.guard_end = cursor = slot.begin + room + guard->after;
    if (!reservation_.allow_access(slot.begin, room)) return false;
    if (slot.writable) {
      if (!shadows_[i].init(slot.bytes)) return false;
      slot.shadow = &shadows_[i];
    }
    // Zeros are not written, so that a large sparse mapping stays sparse.
    for (uint64_t at = 0; at < slot.bytes; at += kChunkBytes) {
      uint64_t n = std::min(kChunkBytes, slot.bytes - at);
      if (memcmp(slot.source + at, zeros, n) != 0) memcpy(slot.begin + at, slot.source + at, n);
    }
  }
  return true;
}

void GuardedMemory::copy_out() {
  for (uint32_t i = 0; i < count_; ++i) {
    const Slot& slot = slots_[i];
    if (!slot.writable) continue;
    for (uint64_t at = 0; at < slot.bytes; at += kChunkBytes) {
      uint64_t n = std::min(kChunkBytes, slot.bytes - at);
      if (memcmp(slot.source + at, slot.begin + at, n) != 0)
        memcpy(slot.source + at, slot.begin + at, n);
    }
  }
}

char* GuardedMemory::address(const SimulatorBuffer& buffer) const {
  char* storage = static_cast<char*>(buffer.storage);
  for (uint32_t i = 0; i < count_; ++i) {
    const Slot& slot = slots_[i];
    bool holds = buffer.bytes ? storage >= slot.source && storage < slot.source + slot.bytes
                              : storage == slot.source;
    if (holds) return slot.begin + (storage - slot.source) + buffer.offset;
  }
  return nullptr;
}

}  // namespace metal_attn::simulator
