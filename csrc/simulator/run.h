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
  __msl_launch launch;  // without the fields that differ between threadgroups
  uint64_t threadgroups;
  GuardedMemory memory;  // checked runs only
  Owners owners;         // of intervals of device memory
  Messages messages;
  CodeRange code;  // of the kernel's image

  std::atomic<uint64_t> next{0};  // the threadgroup that starts next, in running order
  // One past the last threadgroup that starts. A fault lowers it to the threadgroup of the fault.
  // Earlier threadgroups still finish, so that the reported fault does not depend on timing.
  std::atomic<uint64_t> end;
  std::mutex mutex;      // guards the following fields
  uint32_t working = 0;  // host threads that have not finished
  uint32_t stuck = 0;    // host threads whose threadgroups only poll in this round
  uint32_t round = 1;
  uint32_t stuck_rounds = 0;  // consecutive rounds in which all were stuck
  std::condition_variable finished;
  bool grows = false;  // a threadgroup polls and others have not begun: add a host thread
  std::atomic<bool> may_grow{true};
  uint64_t fault_order = ~uint64_t{0};
  SimulatorFaultReport fault{};
  SimulatorCounters counters{};
  const char* reason = nullptr;  // why give_up was called

  // Keeps the fault of the first threadgroup in running order.
  void record(uint64_t order, const SimulatorFaultReport& report);
  void give_up(const char* reason);
  // Counts a threadgroup that only polls as stuck. last_round: the round in which it was last
  // counted, or 0. Returns true if all running threadgroups were stuck for kStuckRounds rounds.
  bool all_stuck(uint32_t& last_round);
};

}  // namespace metal_attn::simulator
