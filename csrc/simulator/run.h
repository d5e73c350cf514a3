// One dispatch: the state that its workers share.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "../../torch_metal_attn/simulator/shim/abi.h"
#include "clock.h"
#include "engine.h"
#include "fence.h"
#include "memory.h"
#include "signals.h"

namespace metal_attn::simulator {

struct Run {
  const SimulatorDispatch* dispatch;
  void (*kernel)(const __msl_launch*, const __msl_thread*);
  __msl_launch launch;  // all but the fields of one threadgroup
  uint64_t threadgroups;
  GuardedMemory memory;  // checked runs only
  Owners owners;         // of intervals of device memory
  Messages messages;
  CodeRange code;  // of the kernel's image

  std::atomic<uint64_t> next{0};  // in running order
  // A fault ends the threadgroups that are after its own in running order; the others still finish.
  // So the reported fault does not depend on timing.
  std::atomic<uint64_t> end;
  std::mutex mutex;      // for the following fields
  uint32_t working = 0;  // host threads
  uint32_t stuck = 0;    // host threads whose threadgroups only poll in this round
  uint32_t round = 1;
  uint32_t stuck_rounds = 0;  // consecutive rounds in which all were stuck
  std::condition_variable finished;
  bool grows = false;  // a threadgroup polls and others have not begun: add a host thread
  std::atomic<bool> may_grow{true};
  uint64_t fault_order = ~uint64_t{0};
  SimulatorFaultReport fault{};
  SimulatorCounters counters{};
  const char* reason = nullptr;  // of give_up

  // Keeps the first fault in running order.
  void record(uint64_t order, const SimulatorFaultReport& report);
  void give_up(const char* reason);
  // Notes that a threadgroup only polls. last_round: the last round in which it noted this, or 0.
  // True if all running threadgroups have only polled for kStuckRounds rounds.
  bool all_stuck(uint32_t& last_round);
};

}  // namespace metal_attn::simulator
