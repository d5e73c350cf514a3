// One host thread's part of a run. A worker runs one threadgroup at a time, with a fiber for each
// GPU thread. Its region holds this object, the fibers' stacks and the threadgroup memory.
#pragma once

#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <memory>

#include "../../torch_metal_attn/simulator/shim/abi.h"
#include "arena.h"
#include "clock.h"
#include "engine.h"
#include "fence.h"
#include "fiber.h"
#include "lane_map.h"
#include "run.h"
#include "shadow.h"

namespace metal_attn::simulator {

constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kMaxGroups = kMaxThreads / MSL_SIMD_WIDTH;
constexpr uint32_t kNoSite = ~0u;
constexpr uintptr_t kNullBytes = 4096;  // lower addresses come from a null pointer
constexpr char kNoMemory[] = "there is too little memory to check for races";
// An odd number of cache lines, so that the threads' frames are in different sets of the caches.
constexpr uint64_t kStackStride = 4061 * 64;

struct Group;

// A SIMD operation that lanes have arrived at. `site` identifies a place of the source.
struct Operation {
  const void* site;
  __msl_combine combine;
  uint32_t kind;
  uint32_t memory_flags;          // of a barrier; of a tensor operation: 1 if it was counted before
  const __msl_product* products;  // of a batch; null for one product
  uint32_t product_count;
};

// A simdgroup_load or simdgroup_store. After kMatrixLog of these, the lanes of a SIMD group meet.
constexpr uint32_t kMatrixLog = 64;
struct MatrixAccess {
  const void* site;
  uint32_t place;  // of the source
  uint32_t depth;
  uint32_t rounds[MSL_MOST_LOOPS];
};

struct Fiber : __msl_thread {
  Context context;
  Group* group;
  Operation stray;  // what it waits at, if that is not the operation of its SIMD group's first lane
  uint32_t after_fence[kMemories];  // the interval that its last fence began; 0: no fence
  uint32_t stack;
  uint32_t spins;
  uint32_t broadcast[2];  // the lane that it reads, for each box of the exchange
  uint32_t matrix_accesses;
  bool started;
};

// A SIMD group. A live lane is in one of ready, arrived (at a SIMD operation) and at_barrier.
struct Group {
  Fiber* lanes;
  uint32_t ready;
  uint32_t arrived;
  uint32_t live;
  uint32_t full;    // all lanes that exist
  uint32_t first;   // the lane that waits at `operation`
  uint32_t strays;  // lanes at another operation, or in another round of a loop
  uint32_t at_barrier;
  // Deposits alternate between two boxes: some lanes still read the last results while others
  // deposit for the next operation.
  uint32_t parity;
  uint32_t intervals[kMemories];  // of its current accesses; 0: none yet
  Operation operation;            // of the first lane to arrive
  uint32_t matrix_accesses;       // of the lane that is ahead
  MatrixAccess matrix_log[kMatrixLog];
  __msl_exchange exchanges[2];
  __msl_matrices matrices[MSL_MOST_PRODUCTS];
};

// A plain write to bytes that another thread has written, where nothing orders the two writes. It
// is a race unless both write the same value, which is known only after the write. The other thread
// is in the same threadgroup (device memory) or in the same SIMD group (threadgroup memory).
struct Rewrite {
  static constexpr uint32_t kMostBytes = 64;

  const char* address;
  const Slot* slot;          // null in threadgroup memory
  const Variable* variable;  // null in device memory
  uint32_t bytes;            // 0: there is no such write
  uint32_t site;
  Touch other;
  char before[kMostBytes];  // the bytes before the write
};

struct Worker : __msl_worker {
  Run* run;
  __msl_launch launch;
  Context host;
  uint64_t order;   // the threadgroup's place in running order
  uint64_t random;  // state of draw(); 0: lanes and SIMD groups run in order
  bool checked;
  bool failed;
  uint32_t threads;
  uint32_t group_count;
  uint32_t live;
  uint32_t waiting;  // at the threadgroup barrier
  const void* barrier_site;
  uint32_t barrier_fiber;
  uint32_t barrier_flags;  // as memory_flags of Operation
  // Set if the threads wait at a tensor operation of all SIMD groups; null at a plain barrier.
  __msl_combine barrier_combine;
  __msl_slot deposits[kMaxThreads];
  uint32_t stuck;  // last_round of Run::all_stuck
  std::chrono::steady_clock::time_point polling_since;
  uint32_t stacks_used;
  uint32_t most_stacks;  // of any threadgroup
  uint32_t free_stacks;
  uint32_t free_stack[kMaxThreads];
  char* stacks;
  uint64_t step_limit;
  // For the host thread's signal handler.
  volatile bool in_fiber;
  volatile int stopped_by;  // a signal, or 0
  void* volatile stopped_at;
  alignas(16) char signal_stack[64 * 1024];
  Arena arena;
  SimulatorCounters counters;
  Shadow shadow;  // of threadgroup memory; checked runs only
  Clock clocks[kMemories];
  std::unique_ptr<Order[]> orders;  // of each thread; null while there are no fences
  Rewrite rewrite;                  // the running thread's last access, if it is a rewrite
  const Slot* last_slot;
  LaneMaps lane_maps;
  std::unique_ptr<float[]> tensor_memory;  // owns `scratch`; null before the first tensor operation
  const char* image_page;                  // a page of the image's data
  Fiber fibers[kMaxThreads];
  Group groups[kMaxGroups];

  Fiber& current() { return *static_cast<Fiber*>(running); }

  // Runs the threadgroup at `position` to its end or its first fault.
  void run_threadgroup(const uint32_t position[3], uint64_t order, uint64_t random);

  // The following functions run on the stack of the current fiber.
  void meet(const Operation& operation);
  void wait_at_barrier(uint32_t flags, const void* site, __msl_combine combine);
  void spin();
  void interleave();  // often lets another ready thread run first
  bool weak_fails();
  void access_matrix(const void* site);
  void finish();  // returns when another thread is to start on this stack
  [[noreturn]] __attribute__((format(printf, 6, 7))) void fail(const Fiber& fiber, uint32_t kind,
                                                               uint32_t site, uint32_t other_site,
                                                               const char* format, ...);
  // A fault of the current thread at one site.
  [[noreturn]] __attribute__((format(printf, 4, 5))) void fail(uint32_t kind, uint32_t site,
                                                               const char* format, ...);
  uint32_t begin_interval(Memory memory);
  uint32_t interval(Group& group, Memory memory) {
    uint32_t& now = group.intervals[memory];
    return now ? now : now = begin_interval(memory);
  }
  void pass_fence(uint32_t flags, bool local);
  void publish(const void* address, bool update);
  void observe(const void* address);
  // Ends the run as a bad request.
  [[noreturn]] void give_up(const char* reason);

 private:
  [[noreturn]] void abandon();
  void go_on();
  void share_order(uint32_t flags);
  void share_order(Group& group, uint32_t flags);
  void run_fibers();
  void report_signal();
  void record(const Fiber& fiber, uint32_t kind, uint32_t site, uint32_t other_site,
              const char* format, va_list arguments);
  void settle(Group& group);
  void complete(Group& group, uint32_t mask, const Operation& operation);
  void complete_some(Group& group);
  void release_barrier();
  void end_matrix_accesses(Group& group);
  [[noreturn]] void fail_matrix_access(const Group& group, uint32_t number);
  Fiber* next(Group& group);
  Group& ready_from(uint32_t start);
  Fiber* next_at_random(Group& group);
  void unblock();
  void resume(Context& from, Fiber& to);
  uint64_t draw();
};

inline Worker& this_worker() {
  return *reinterpret_cast<Worker*>(stack_pointer() & ~(MSL_REGION_BYTES - 1));
}

// Checks of memory accesses in checked images. settle_rewrite compares the bytes of a rewrite.
void settle_rewrite(Worker& worker);
void engine_access(const void* address, unsigned bytes, unsigned flags, unsigned site);
void* engine_threadgroup_memory(const char* name, unsigned long bytes, unsigned long alignment);

// Checked images call these at undefined arithmetic, private memory accesses and control flow.
void engine_undefined(unsigned what, const void* about, unsigned long a, unsigned long b,
                      unsigned site);
unsigned engine_private_access(const char* address, unsigned bytes, unsigned lanes,
                               const char* base, unsigned size, char* marks, unsigned flags,
                               unsigned stored_lanes, unsigned site);
void engine_endless(unsigned site);
void engine_enter(unsigned site);

extern const __msl_engine kEngine;

}  // namespace metal_attn::simulator
