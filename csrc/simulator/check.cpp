#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "worker.h"

namespace metal_attn::simulator {
namespace {

const char* verb(unsigned flags) { return flags & MSL_WRITE ? "write" : "read"; }

bool updates(unsigned flags) { return (flags & MSL_UPDATE) == MSL_UPDATE; }
bool reads(unsigned flags) { return !(flags & MSL_WRITE) || updates(flags); }

inline void count(SimulatorCounters& counters, SimulatorSpace space, unsigned bytes,
                  unsigned flags) {
  if (flags & MSL_UNCOUNTED) return;
  // An atomic read-modify-write counts as a store only.
  if (flags & MSL_WRITE) {
    ++counters.stores[space];
    counters.store_bytes[space] += bytes;
  } else {
    ++counters.loads[space];
    counters.load_bytes[space] += bytes;
  }
}

inline Touch touch_of(const Fiber& fiber, uint32_t interval, unsigned site) {
  return {interval, std::min(site, Touch::kNoSite), fiber.index};
}

inline Access access_of(Worker& worker, Memory memory, unsigned flags, unsigned site) {
  const Fiber& fiber = worker.current();
  uint32_t since = worker.interval(*fiber.group, memory);
  Touch touch = touch_of(fiber, std::max(since, fiber.after_fence[memory]), site);
  int kind = (flags & MSL_WRITE ? kWrite : kRead) | (flags & MSL_ATOMIC ? kAtomic : 0);
  return {touch,
          since,
          static_cast<uint8_t>(kind),
          reads(flags),
          memory,
          worker.clocks[memory],
          worker.orders ? worker.orders[fiber.index].known.get() : nullptr};
}

uint32_t site_of(const Touch& touch) { return touch.site == Touch::kNoSite ? kNoSite : touch.site; }

// Reports a race at a byte of a buffer, or of a threadgroup variable if `slot` is null.
[[noreturn]] void fail_race(Worker& worker, const Slot* slot, const Variable* variable, uint64_t at,
                            unsigned flags, unsigned site, const Touch& other,
                            unsigned other_flags) {
  char place[sizeof SimulatorFaultReport::message];
  if (slot)
    snprintf(place, sizeof place, "buffer(%u)", slot->index);
  else
    snprintf(place, sizeof place, "threadgroup variable %s", variable->name);
  const Fiber& fiber = worker.current();
  const Clock& clock = worker.clocks[slot ? kDeviceMemory : kThreadgroupMemory];
  unsigned long long byte = at;
  if (clock.foreign(other.interval)) {
    const uint32_t* grid = worker.launch.threadgroups;
    uint32_t owner = clock.owner(other.interval);
    worker.fail(fiber, FAULT_RACE, site, site_of(other),
                "thread %u %ss byte %llu of %s, which thread %u of threadgroup (%u, %u, %u) %ss, "
                "and nothing orders the two threadgroups",
                fiber.index, verb(flags), byte, place, other.thread, owner % grid[0],
                owner / grid[0] % grid[1], owner / grid[0] / grid[1], verb(other_flags));
  }
  bool same_simdgroup = other.simdgroup() == fiber.simdgroup;
  worker.fail(fiber, FAULT_RACE, site, site_of(other),
              "thread %u %ss byte %llu of %s, which thread %u of %s SIMD group %ss, and no %s%s is "
              "between the two accesses",
              fiber.index, verb(flags), byte, place, other.thread,
              same_simdgroup ? "the same" : "another", verb(other_flags),
              same_simdgroup ? "barrier" : "threadgroup_barrier",
              slot ? " with mem_flags::mem_device" : "");
}

// Allows a write and saves the old bytes. It is a race if the write changes them (settle_rewrite).
void allow_rewrite(Worker& worker, Shadow& shadow, const Slot* slot, const Variable* variable,
                   uint64_t offset, const char* address, unsigned bytes, const Access& access,
                   const Touch& other) {
  if (shadow.access(offset, bytes, access, /*checked=*/false).kind != Conflict::kNone)
    worker.give_up(kNoMemory);
  worker.rewrite = {address, slot, variable, bytes, access.touch.site, other, {}};
  memcpy(worker.rewrite.before, address, bytes);
}

bool is_rewrite(const Access& access, const ConflictReport& conflict, unsigned bytes) {
  return access.kind == kWrite && conflict.other_kind == kWrite && bytes <= Rewrite::kMostBytes;
}

void check_order(Worker& worker, const Slot& slot, uint64_t offset, unsigned bytes, unsigned flags,
                 unsigned site) {
  const Access access = access_of(worker, kDeviceMemory, flags, site);
  const ConflictReport conflict = slot.shadow->access(offset, bytes, access);
  if (conflict.kind == Conflict::kNone) return;
  if (conflict.kind == Conflict::kNoMemory) worker.give_up(kNoMemory);
  if (!is_rewrite(access, conflict, bytes) || access.clock.foreign(conflict.other.interval))
    fail_race(worker, &slot, nullptr, offset + conflict.byte, flags, site, conflict.other,
              conflict.other_kind);
  allow_rewrite(worker, *slot.shadow, &slot, nullptr, offset, slot.begin + offset, bytes, access,
                conflict.other);
}

void check_initialised(Worker& worker, const Slot& slot, uint64_t offset, unsigned bytes,
                       unsigned flags, unsigned site) {
  uint8_t* known = slot.initialised + offset;
  for (unsigned i = 0; reads(flags) && i < bytes; ++i) {
    if (known[i]) continue;
    worker.fail(FAULT_UNINITIALISED, site,
                "read of %u bytes of buffer(%u): byte %llu has not been written", bytes, slot.index,
                static_cast<unsigned long long>(offset + i));
  }
  for (unsigned i = 0; flags & MSL_WRITE && i < bytes; ++i) known[i] = 1;
}

void check_device(Worker& worker, const Slot& slot, const char* address, unsigned bytes,
                  unsigned flags, unsigned site) {
  if (address < slot.begin || address + bytes > slot.begin + slot.bytes) {
    worker.fail(FAULT_OUT_OF_BOUNDS, site,
                "%s of %u bytes at byte %lld of buffer(%u), which has %llu bytes", verb(flags),
                bytes, static_cast<long long>(address - slot.begin), slot.index,
                static_cast<unsigned long long>(slot.bytes));
  }
  if ((flags & MSL_WRITE) && !slot.writable) {
    worker.fail(FAULT_CONSTANT_WRITE, site,
                "write of %u bytes at byte %lld of read-only buffer(%u)", bytes,
                static_cast<long long>(address - slot.begin), slot.index);
  }
  uint64_t offset = static_cast<uint64_t>(address - slot.begin);
  if (slot.shadow) check_order(worker, slot, offset, bytes, flags, site);
  if (slot.initialised) check_initialised(worker, slot, offset, bytes, flags, site);
}

void check_threadgroup(Worker& worker, const char* address, unsigned bytes, unsigned flags,
                       unsigned site) {
  const Variable* variable = worker.arena.find(address, bytes);
  if (!variable) {
    const Variable* near = worker.arena.nearest(address, bytes);
    long long at = near ? address - worker.arena.data() - static_cast<long long>(near->begin) : 0;
    worker.fail(FAULT_THREADGROUP_OUT_OF_BOUNDS, site,
                "%s of %u bytes at byte %lld of threadgroup variable %s, which has %u bytes",
                verb(flags), bytes, at, near ? near->name : "?", near ? near->bytes : 0);
  }
  uint32_t offset = static_cast<uint32_t>(address - worker.arena.data());
  const Access access = access_of(worker, kThreadgroupMemory, flags, site);
  const ConflictReport conflict = worker.shadow.access(offset, bytes, access);
  if (conflict.kind == Conflict::kNone) return;
  if (conflict.kind == Conflict::kNoMemory) worker.give_up(kNoMemory);
  unsigned at = offset + conflict.byte - variable->begin;
  if (conflict.kind == Conflict::kUninitialised) {
    worker.fail(FAULT_UNINITIALISED, site,
                "read of %u bytes of threadgroup variable %s: byte %u has not been written", bytes,
                variable->name, at);
  }
  if (!is_rewrite(access, conflict, bytes) ||
      conflict.other.simdgroup() != access.touch.simdgroup())
    fail_race(worker, nullptr, variable, at, flags, site, conflict.other, conflict.other_kind);
  allow_rewrite(worker, worker.shadow, nullptr, variable, offset, address, bytes, access,
                conflict.other);
}

// A fast path for the most common accesses to threadgroup memory. True if the access is recorded.
inline bool is_settled(Worker& worker, const char* address, unsigned bytes, unsigned flags,
                       unsigned site) {
  uint64_t offset = static_cast<uint64_t>(address - worker.arena.data());
  bool aligned = bytes == 4 || bytes == 8 || bytes == 16;
  aligned = aligned && !(reinterpret_cast<uintptr_t>(address) & (bytes - 1));
  if (offset >= Arena::kBytes || flags & ~MSL_WRITE || !aligned || worker.orders ||
      !worker.arena.find(address, bytes))
    return false;
  const Fiber& fiber = worker.current();
  uint32_t since = worker.interval(*fiber.group, kThreadgroupMemory);
  return worker.shadow.access_settled(static_cast<uint32_t>(offset), bytes, flags & MSL_WRITE,
                                      touch_of(fiber, since, site), since,
                                      worker.clocks[kThreadgroupMemory]);
}

// Private memory is on the thread's stack, above the caller's frame.
void check_thread(Worker& worker, const char* address, unsigned bytes, unsigned flags,
                  unsigned site) {
  const Fiber& fiber = worker.current();
  const char* end = worker.stacks + (fiber.stack + 1) * kStackStride;
  if (address >= reinterpret_cast<const char*>(stack_pointer()) && address + bytes <= end) return;
  worker.fail(FAULT_PRIVATE_OUT_OF_BOUNDS, site,
              "%s of %u bytes outside of the thread's own memory", verb(flags), bytes);
}

// True for data of the kernel's image, that is `constant` tables at program scope.
bool in_image(Worker& worker, const char* address) {
  auto page =
      reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(address) & ~uintptr_t{4095});
  if (page && page == worker.image_page) return true;
  Dl_info here, image;
  bool inside = dladdr(address, &here) && dladdr(worker.run->dispatch->entry, &image) &&
                here.dli_fbase == image.dli_fbase;
  if (inside) worker.image_page = page;
  return inside;
}

// Checks an access, and returns the address space that it is in.
SimulatorSpace check_access(Worker& worker, const char* address, unsigned bytes, unsigned flags,
                            unsigned site) {
  uint64_t in_region = static_cast<uint64_t>(address - reinterpret_cast<const char*>(&worker));
  if (in_region < MSL_REGION_BYTES && worker.arena.contains(address)) {
    check_threadgroup(worker, address, bytes, flags, site);
    return SPACE_THREADGROUP;
  }
  if (in_region < MSL_REGION_BYTES) {
    check_thread(worker, address, bytes, flags, site);
    return SPACE_THREAD;
  }
  const Slot* slot = worker.last_slot;
  if (!slot || address < slot->guard_begin || address >= slot->guard_end)
    worker.last_slot = slot = worker.run->memory.find(address);
  if (slot) {
    check_device(worker, *slot, address, bytes, flags, site);
    return static_cast<SimulatorSpace>(slot->space);
  }
  if (!(flags & MSL_WRITE) && in_image(worker, address)) return SPACE_CONSTANT;
  auto number = reinterpret_cast<uintptr_t>(address);
  if (number < kNullBytes)
    worker.fail(FAULT_OUT_OF_BOUNDS, site, "%s of %u bytes at byte %lu of a null pointer",
                verb(flags), bytes, static_cast<unsigned long>(number));
  worker.fail(FAULT_OUT_OF_BOUNDS, site, "%s of %u bytes at address %p, far from every argument",
              verb(flags), bytes, static_cast<const void*>(address));
}

}  // namespace

void settle_rewrite(Worker& worker) {
  Rewrite& rewrite = worker.rewrite;
  const char* now = rewrite.address;
  uint32_t bytes = rewrite.bytes, same = 0, site = rewrite.site;
  rewrite.bytes = 0;
  while (same < bytes && now[same] == rewrite.before[same]) ++same;
  if (same == bytes) return;
  const char* begin =
      rewrite.slot ? rewrite.slot->begin : worker.arena.data() + rewrite.variable->begin;
  fail_race(worker, rewrite.slot, rewrite.variable, static_cast<uint64_t>(now + same - begin),
            MSL_WRITE, site, rewrite.other, MSL_WRITE);
}

void engine_access(const void* pointer, unsigned bytes, unsigned flags, unsigned site) {
  Worker& worker = this_worker();
  if (worker.rewrite.bytes) settle_rewrite(worker);
  if ((flags & MSL_ATOMIC) && worker.random) worker.interleave();
  auto address = static_cast<const char*>(pointer);
  if (is_settled(worker, address, bytes, flags, site))
    return count(worker.counters, SPACE_THREADGROUP, bytes, flags);
  if (site == kNoSite) site = worker.current().site;
  const SimulatorSpace space = check_access(worker, address, bytes, flags, site);
  if (!(flags & MSL_ALIGNMENT_UNKNOWN) && bytes <= 16 && (bytes & (bytes - 1)) == 0 &&
      (reinterpret_cast<uintptr_t>(address) & (bytes - 1)) && space != SPACE_THREAD) {
    worker.fail(FAULT_MISALIGNED, site,
                "%s of %u bytes at an address that is only a multiple of %u bytes", verb(flags),
                bytes, 1u << __builtin_ctzl(reinterpret_cast<uintptr_t>(address)));
  }
  if ((flags & MSL_ATOMIC) && (flags & MSL_WRITE) && worker.run->messages.any())
    worker.publish(address, updates(flags));
  count(worker.counters, space, bytes, flags);
}

void* engine_threadgroup_memory(const char* name, unsigned long bytes, unsigned long alignment) {
  Worker& worker = this_worker();
  char* memory = worker.arena.get(name, bytes, alignment);
  if (!memory) {
    worker.fail(FAULT_THREADGROUP_MEMORY, worker.current().site,
                "%lu bytes for %s and %u bytes for other variables exceed the limit of %u bytes of "
                "threadgroup memory",
                bytes, name, worker.arena.used(), Arena::kLimit);
  }
  return memory;
}

}  // namespace metal_attn::simulator
