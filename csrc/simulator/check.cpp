#include "check.h"

#include <dlfcn.h>

#include "worker.h"

namespace metal_attn::simulator {
namespace {

const char* verb(unsigned flags) { return flags & MSL_WRITE ? "write" : "read"; }

void count(SimulatorCounters& counters, SimulatorSpace space, unsigned bytes, unsigned flags) {
  // An atomic read-modify-write is one store.
  if (flags & MSL_WRITE) {
    ++counters.stores[space];
    counters.store_bytes[space] += bytes;
  } else {
    ++counters.loads[space];
    counters.load_bytes[space] += bytes;
  }
}

void check_device(Worker& worker, const Slot& slot, const char* address, unsigned bytes,
                  unsigned flags, unsigned site) {
  Fiber& fiber = worker.current();
  if (address < slot.begin || address + bytes > slot.begin + slot.bytes) {
    worker.fail(fiber, FAULT_OUT_OF_BOUNDS, site, kNoSite,
                "%s of %u bytes at byte %lld of buffer(%u), which has %llu", verb(flags), bytes,
                static_cast<long long>(address - slot.begin), slot.index,
                static_cast<unsigned long long>(slot.bytes));
  }
  if ((flags & MSL_WRITE) && !slot.writable) {
    worker.fail(fiber, FAULT_CONSTANT_WRITE, site, kNoSite,
                "write of %u bytes at byte %lld of read-only buffer(%u)", bytes,
                static_cast<long long>(address - slot.begin), slot.index);
  }
}

void check_threadgroup(Worker& worker, const char* address, unsigned bytes, unsigned flags,
                       unsigned site) {
  Fiber& fiber = worker.current();
  const Variable* variable = worker.arena.find(address, bytes);
  if (!variable) {
    const Variable* near = worker.arena.nearest(address);
    long long at = near ? address - worker.arena.data() - static_cast<long long>(near->begin) : 0;
    worker.fail(fiber, FAULT_THREADGROUP_OUT_OF_BOUNDS, site, kNoSite,
                "%s of %u bytes at byte %lld of threadgroup variable %s, which has %u", verb(flags),
                bytes, at, near ? near->name : "?", near ? near->bytes : 0);
  }
  uint32_t offset = static_cast<uint32_t>(address - worker.arena.data());
  const ShadowAccess access = {worker.arena_epoch,
                               worker.first_epoch,
                               fiber.group->epoch,
                               site,
                               static_cast<uint16_t>(fiber.index),
                               (flags & MSL_WRITE) != 0,
                               (flags & MSL_ATOMIC) != 0};
  ConflictReport conflict = worker.shadow.access(offset, bytes, access);
  if (conflict.kind == Conflict::kNone) return;
  unsigned at = offset + conflict.byte - variable->begin;
  if (conflict.kind == Conflict::kUninitialised) {
    worker.fail(fiber, FAULT_UNINITIALISED, site, kNoSite,
                "read of %u bytes of threadgroup variable %s: byte %u has not been written", bytes,
                variable->name, at);
  }
  bool same_group = conflict.other_thread / MSL_SIMD_WIDTH == fiber.simdgroup;
  const char* other = conflict.kind == Conflict::kReadWrite ? "reads" : "writes";
  worker.fail(fiber, FAULT_RACE, site, conflict.other_site,
              "thread %u %ss byte %u of threadgroup variable %s, which thread %u of %s SIMD group "
              "%s with no %s between",
              fiber.index, verb(flags), at, variable->name, conflict.other_thread,
              same_group ? "the same" : "another", other,
              same_group ? "barrier" : "threadgroup_barrier");
}

// Private memory is on the thread's own stack, above the caller's frame.
void check_thread(Worker& worker, const char* address, unsigned bytes, unsigned flags,
                  unsigned site) {
  const Fiber& fiber = worker.current();
  const char* end = worker.stacks + (fiber.stack + 1) * kStackStride;
  if (address >= reinterpret_cast<const char*>(stack_pointer()) && address + bytes <= end) return;
  worker.fail(fiber, FAULT_PRIVATE_OUT_OF_BOUNDS, site, kNoSite,
              "%s of %u bytes outside of the thread's own memory", verb(flags), bytes);
}

// Data of the image itself: `constant` tables at program scope.
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

}  // namespace

void engine_access(const void* pointer, unsigned bytes, unsigned flags, unsigned site) {
  Worker& worker = this_worker();
  auto address = static_cast<const char*>(pointer);
  if ((flags & MSL_ATOMIC) && site == kNoSite) site = worker.current().site_id;
  SimulatorSpace space;
  uint64_t in_region = static_cast<uint64_t>(address - reinterpret_cast<const char*>(&worker));
  if (in_region < MSL_REGION_BYTES) {
    if (worker.arena.contains(address)) {
      space = SPACE_THREADGROUP;
      check_threadgroup(worker, address, bytes, flags, site);
    } else {
      space = SPACE_THREAD;
      check_thread(worker, address, bytes, flags, site);
    }
  } else {
    const Slot* slot = worker.last_slot;
    if (!slot || address < slot->guard_begin || address >= slot->guard_end)
      slot = worker.run->memory.find(address);
    worker.last_slot = slot;
    if (slot) {
      space = slot->writable ? SPACE_DEVICE : SPACE_CONSTANT;
      check_device(worker, *slot, address, bytes, flags, site);
    } else {
      space = SPACE_CONSTANT;
      if ((flags & MSL_WRITE) || !in_image(worker, address)) {
        const Fiber& fiber = worker.current();
        worker.fail(fiber, FAULT_OUT_OF_BOUNDS, site, kNoSite,
                    "%s of %u bytes at address %p, far from every argument", verb(flags), bytes,
                    pointer);
      }
    }
  }
  if (!(flags & MSL_ALIGNMENT_UNKNOWN) && bytes <= 16 && (bytes & (bytes - 1)) == 0 &&
      (reinterpret_cast<uintptr_t>(address) & (bytes - 1)) && space != SPACE_THREAD) {
    const Fiber& fiber = worker.current();
    worker.fail(fiber, FAULT_MISALIGNED, site, kNoSite,
                "%s of %u bytes at an address that is a multiple of %u only", verb(flags), bytes,
                1u << __builtin_ctzl(reinterpret_cast<uintptr_t>(address)));
  }
  count(worker.counters, space, bytes, flags);
}

}  // namespace metal_attn::simulator
