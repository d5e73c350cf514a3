// Ends a threadgroup early: at a fault, at a signal, or because the run cannot continue.
#include <signal.h>

#include <cstdio>
#include <cstring>

#include "worker.h"

namespace metal_attn::simulator {

void Worker::record(const Fiber& fiber, uint32_t kind, uint32_t site, uint32_t other_site,
                    const char* format, va_list arguments) {
  SimulatorFaultReport report{};
  report.kind = kind;
  report.site = site;
  report.other_site = other_site;
  memcpy(report.threadgroup, launch.position, sizeof report.threadgroup);
  memcpy(report.thread, fiber.position, sizeof report.thread);
  vsnprintf(report.message, sizeof report.message, format, arguments);
  run->record(order, report);
  failed = true;
}

void Worker::give_up(const char* reason) {
  run->give_up(reason);
  abandon();
}

void Worker::abandon() {
  failed = true;
  Context abandoned;
  switch_context(&abandoned, &host);
  __builtin_unreachable();
}

void Worker::fail(const Fiber& fiber, uint32_t kind, uint32_t site, uint32_t other_site,
                  const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record(fiber, kind, site, other_site, format, arguments);
  va_end(arguments);
  abandon();
}

void Worker::fail(uint32_t kind, uint32_t site, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record(current(), kind, site, kNoSite, format, arguments);
  va_end(arguments);
  abandon();
}

void Worker::fail_matrix_access(const Group& group, uint32_t number) {
  uint32_t mask = 0;
  for (uint32_t lane = 0; lane < MSL_SIMD_WIDTH; ++lane)
    if (group.full >> lane & 1 && group.lanes[lane].matrix_accesses > number) mask |= 1u << lane;
  fail(group.lanes[__builtin_ctz(mask)], FAULT_PARTIAL_SIMD, group.matrix_log[number].place,
       kNoSite,
       "simdgroup_load or simdgroup_store reached by lanes %08x, but SIMD group %u has "
       "lanes %08x",
       mask, group.lanes->simdgroup, group.full);
}

// Reports the signal that has stopped the running fiber, if there is one.
void Worker::report_signal() {
  const Fiber& fiber = current();
  auto report = [&](uint32_t kind, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    record(fiber, kind, fiber.site, kNoSite, format, arguments);
    va_end(arguments);
  };
  switch (stopped_by) {
    case SIGSEGV:
    case SIGBUS:
      if (reinterpret_cast<uintptr_t>(stopped_at) < kNullBytes)
        return report(FAULT_OUT_OF_BOUNDS, "access at byte %lu of a null pointer",
                      static_cast<unsigned long>(reinterpret_cast<uintptr_t>(stopped_at)));
      return report(FAULT_OUT_OF_BOUNDS, "access at address %p, far from every argument",
                    stopped_at);
    case SIGFPE:
      return report(FAULT_INTEGER_DIVISION,
                    "division by zero, or division of the smallest integer by -1");
    case SIGILL:
    case SIGTRAP:
      return report(FAULT_PRIVATE_OUT_OF_BOUNDS, "access outside of a private variable");
  }
}

}  // namespace metal_attn::simulator
