// Chooses the fiber that runs next at SIMD operations and barriers, and reports deadlocks.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "worker.h"

namespace metal_attn::simulator {
namespace {

// A thread that polls lets other threads run once in so many calls of `spin`.
constexpr uint32_t kSpinsBeforeYield = 64;
// A threadgroup is stuck if it has only polled, so many times and for so long. Time alone does not
// suffice, because the host may have run other programs.
constexpr uint32_t kPollLimit = 1024;
constexpr std::chrono::seconds kPollTimeLimit{3};
// After this time another host thread may start to run the next threadgroup.
constexpr std::chrono::milliseconds kGrowAfter{20};

uint32_t lowest(uint32_t mask) { return static_cast<uint32_t>(__builtin_ctz(mask)); }

// The n-th set bit, from 0.
uint32_t nth(uint32_t mask, uint32_t n) {
  while (n--) mask &= mask - 1;
  return lowest(mask);
}

// Computes the products of a batch, in order.
void multiply(__msl_matrices* matrices, const Operation& batch, uint32_t mask) {
  for (uint32_t i = 0; i < batch.product_count; ++i) {
    const __msl_product& product = batch.products[i];
    if (product.accumulator >= 0)
      memcpy(matrices[i].c, matrices[product.accumulator].d, sizeof matrices[i].c);
    product.combine(&matrices[i], mask);
  }
}

const Operation& operation_of(const Group& group, uint32_t lane) {
  return group.strays >> lane & 1 ? group.lanes[lane].stray : group.operation;
}

// True if two threads that wait at one call are in the same rounds of all loops around it.
bool same_rounds(const Fiber& a, const Fiber& b) {
  for (uint32_t i = 0; i < a.depth; ++i)
    if (a.rounds[i].number != b.rounds[i].number) return false;
  return true;
}

// True if the program reaches a's place before b's.
bool is_before(const Fiber& a, const Fiber& b) {
  for (uint32_t i = 0; i < std::min(a.depth, b.depth) && a.rounds[i].loop == b.rounds[i].loop; ++i)
    if (a.rounds[i].number != b.rounds[i].number) return a.rounds[i].number < b.rounds[i].number;
  return a.place < b.place;
}

bool meet_together(const Group& group, uint32_t a, uint32_t b) {
  return operation_of(group, a).site == operation_of(group, b).site &&
         same_rounds(group.lanes[a], group.lanes[b]);
}

const char* name_of(uint32_t kind) {
  if (kind == MSL_MATRIX) return "matrix operation";
  if (kind == MSL_TENSOR) return "tensor operation";
  return kind == MSL_SIMDGROUP_BARRIER ? "simdgroup_barrier" : "SIMD operation";
}

const char* barrier_name(__msl_combine combine) {
  return combine ? "tensor operation" : "threadgroup_barrier";
}

[[noreturn]] void fiber_main() {
  Worker& worker = this_worker();
  for (;;) {
    worker.run->kernel(&worker.launch, worker.running);
    worker.finish();
  }
}

// Allocates `scratch`. Fails if lanes or SIMD groups of the tensor operation's scope do not exist.
void begin_tensor(Worker& worker, const __msl_tensor_operation& operation) {
  constexpr uint32_t kScratch = MSL_MOST_LEFT + MSL_MOST_RIGHT + MSL_MOST_DESTINATION;
  const Fiber& fiber = worker.current();
  const uint32_t lanes = fiber.group->full;
  if (lanes != ~0u)
    worker.fail(FAULT_TENSOR, fiber.site,
                "tensor operation in SIMD group %u, which has only lanes %08x", fiber.simdgroup,
                lanes);
  if (operation.simdgroups > 1 && operation.simdgroups != worker.group_count)
    worker.fail(FAULT_TENSOR, fiber.site,
                "tensor operation of execution_simdgroups<%u> in a threadgroup of %u SIMD groups",
                operation.simdgroups, worker.group_count);
  if (worker.scratch) return;
  worker.tensor_memory = std::make_unique_for_overwrite<float[]>(kScratch);
  worker.scratch = worker.tensor_memory.get();
}

// deposit: of any thread; it holds the operation's address. is_further: 1 if the operation was
// counted before, so that only its multiplications are added.
void count_tensor(Worker& worker, const __msl_slot& deposit, uint32_t is_further) {
  const __msl_tensor_operation* operation;
  memcpy(&operation, deposit.bytes + 8, sizeof operation);
  worker.counters.tensor_operations += !is_further;
  worker.counters.tensor_multiplications += operation->multiplications;
}

}  // namespace

uint64_t Worker::draw() {
  random ^= random << 13;
  random ^= random >> 7;
  random ^= random << 17;
  return random;
}

// Switches to a fiber, which gets a stack if it has not started.
inline void Worker::resume(Context& from, Fiber& to) {
  running = &to;
  if (!to.started) {
    to.started = true;
    to.stack = free_stacks ? free_stack[--free_stacks] : stacks_used++;
    to.context = fresh_context(stacks + (to.stack + 1) * kStackStride, fiber_main);
  }
  switch_context(&from, &to.context);
}

// A lane loads or stores a matrix, and all other lanes must do so, too. Lanes do not wait for each
// other. The lane that is ahead logs its accesses, and the others compare theirs with the log.
void Worker::access_matrix(const void* site) {
  Fiber& fiber = current();
  Group& group = *fiber.group;
  MatrixAccess access{site, fiber.site, fiber.depth, {}};
  for (uint32_t i = 0; i < fiber.depth; ++i) access.rounds[i] = fiber.rounds[i].number;
  if (fiber.matrix_accesses == group.matrix_accesses)
    group.matrix_log[group.matrix_accesses++] = access;
  else if (const MatrixAccess& other = group.matrix_log[fiber.matrix_accesses];
           memcmp(&other, &access, sizeof access))
    fail(fiber, FAULT_PARTIAL_SIMD, fiber.site, other.place,
         "thread %u is at this simdgroup_load or simdgroup_store, and another lane of its SIMD "
         "group is at %s",
         fiber.index, other.site != site ? "another" : "it in another round of a loop");
  if (++fiber.matrix_accesses == kMatrixLog) meet({site, nullptr, MSL_MATRIX_ACCESS});
}

// Call it when all lanes are at one place. They must have made the same number of accesses.
inline void Worker::end_matrix_accesses(Group& group) {
  if (!group.matrix_accesses) return;
  for (uint32_t rest = group.full; rest; rest &= rest - 1) {
    uint32_t number = group.lanes[lowest(rest)].matrix_accesses;
    if (number != group.matrix_accesses) fail_matrix_access(group, number);
  }
  for (uint32_t rest = group.full; rest; rest &= rest - 1)
    group.lanes[lowest(rest)].matrix_accesses = 0;
  group.matrix_accesses = 0;
}

inline void Worker::complete(Group& group, uint32_t mask, const Operation& operation) {
  __msl_exchange& box = group.exchanges[group.parity];
  box.mask = mask;
  void* deposits = operation.kind == MSL_MATRIX ? static_cast<void*>(group.matrices) : &box;
  if (operation.combine)
    operation.combine(deposits, mask);
  else if (operation.products)
    multiply(group.matrices, operation, mask);
  const uint32_t kind = operation.kind;
  if (kind == MSL_SHUFFLE)
    ++counters.shuffles;
  else if (kind == MSL_REDUCTION)
    ++counters.reductions;
  else if (kind == MSL_MATRIX)
    counters.matrix_operations += operation.products ? operation.product_count : 1;
  else if (kind == MSL_TENSOR)
    count_tensor(*this, box.lanes[lowest(mask)], operation.memory_flags);
  else if (kind != MSL_SIMDGROUP_BARRIER)
    counters.votes += kind != MSL_MATRIX_ACCESS;
  else {
    ++counters.simdgroup_barriers;
    for (uint32_t memory = 0; memory < kMemories; ++memory)
      if (operation.memory_flags & kMemFlags[memory]) group.intervals[memory] = 0;
    if (orders) share_order(group, operation.memory_flags);
  }
  if (mask == group.full) end_matrix_accesses(group);
  go_on();
  group.arrived &= ~mask;
  group.ready |= mask;
  group.parity ^= 1;
}

// Completes the operation of some lanes. The other lanes wait at another operation or have ended.
void Worker::complete_some(Group& group) {
  // The lanes at the earliest place of the program continue, so that diverged lanes can meet again.
  uint32_t lane = lowest(group.arrived), mask = 0;
  bool ordered = true;  // the order of the lanes' places in the program is known
  for (uint32_t rest = group.arrived; rest; rest &= rest - 1) {
    const Fiber& other = group.lanes[lowest(rest)];
    ordered = ordered && other.place != MSL_UNKNOWN_PLACE;
    if (is_before(other, group.lanes[lane])) lane = lowest(rest);
  }
  const Operation operation = operation_of(group, lane);
  for (uint32_t rest = group.arrived; rest; rest &= rest - 1)
    if (meet_together(group, lane, lowest(rest))) mask |= rest & -rest;
  bool barrier = operation.kind == MSL_SIMDGROUP_BARRIER;
  // If the order is unknown, other lanes may reach this operation later.
  bool needs_all = !ordered || operation.kind == MSL_MATRIX || operation.kind == MSL_TENSOR ||
                   (operation.kind != MSL_ACTIVE && run->dispatch->strict_simd);
  if (mask != group.full && (barrier || (checked && needs_all))) {
    const Fiber& fiber = group.lanes[lane];
    fail(fiber, barrier ? FAULT_DIVERGENT_BARRIER : FAULT_PARTIAL_SIMD, fiber.site, kNoSite,
         "%s reached by lanes %08x, but SIMD group %u has lanes %08x; %08x have ended",
         name_of(operation.kind), mask, fiber.simdgroup, group.full, group.full & ~group.live);
  }
  // The other lanes' deposits move to the next box, because results overwrite the current box.
  const uint32_t parity = group.parity;
  for (uint32_t rest = group.arrived & ~mask; rest; rest &= rest - 1) {
    uint32_t other = lowest(rest);
    Fiber& fiber = group.lanes[other];
    group.exchanges[parity ^ 1].lanes[other] = group.exchanges[parity].lanes[other];
    fiber.broadcast[parity ^ 1] = fiber.broadcast[parity];
  }
  complete(group, mask, operation);
  if (!group.arrived) {
    group.strays = 0;
    return;
  }
  uint32_t first = lowest(group.arrived), strays = 0;
  const Operation next_operation = operation_of(group, first);
  for (uint32_t rest = group.arrived; rest; rest &= rest - 1) {
    uint32_t other = lowest(rest);
    if (meet_together(group, first, other)) continue;
    group.lanes[other].stray = Operation(operation_of(group, other));
    strays |= rest & -rest;
  }
  group.operation = next_operation;
  group.first = first;
  group.strays = strays;
}

// Call it when all live lanes have arrived.
inline void Worker::settle(Group& group) {
  if (group.strays || group.arrived != group.full)
    complete_some(group);
  else
    complete(group, group.arrived, group.operation);
}

inline Fiber* Worker::next(Group& group) {
  if (random) return next_at_random(group);
  uint32_t ready = group.ready;
  if (!ready) {
    Group& other = ready_from(static_cast<uint32_t>(&group - groups));
    return &other.lanes[lowest(other.ready)];
  }
  Fiber* fiber = &group.lanes[lowest(ready)];
  // The next ready lane will need its stack soon.
  ready &= ready - 1;
  if (ready) {
    const char* stack = static_cast<const char*>(group.lanes[lowest(ready)].context.stack);
    __builtin_prefetch(stack);
    __builtin_prefetch(stack + 64);
  }
  return fiber;
}

// The first SIMD group from number `start` on, cyclically, that has a ready lane.
Group& Worker::ready_from(uint32_t start) {
  for (;;) {
    for (uint32_t i = 0; i < group_count; ++i) {
      Group& other = groups[start + i < group_count ? start + i : start + i - group_count];
      if (other.ready) return other;
    }
    unblock();
  }
}

Fiber* Worker::next_at_random(Group& group) {
  // As on a GPU, a SIMD group mostly continues, and other SIMD groups sometimes overtake it.
  uint64_t bits = draw();
  bool stays = (bits & 7) && group.ready;
  Group& chosen = stays ? group : ready_from(static_cast<uint32_t>(bits >> 32) % group_count);
  uint32_t count = static_cast<uint32_t>(__builtin_popcount(chosen.ready));
  return &chosen.lanes[nth(chosen.ready, static_cast<uint32_t>(bits >> 8 & 0xFFFF) % count)];
}

// Call it when no thread is ready: some threads wait at a SIMD operation or barrier that others
// have not reached. Makes some lanes ready, or fails.
void Worker::unblock() {
  for (uint32_t i = 0; i < group_count; ++i) {
    if (groups[i].arrived) return complete_some(groups[i]);
  }
  const Fiber& fiber = fibers[barrier_fiber];
  fail(fiber, FAULT_DIVERGENT_BARRIER, fiber.site, kNoSite,
       "%s reached by %u of the threadgroup's %u threads; the others have ended",
       barrier_name(barrier_combine), waiting, threads);
}

// Waits until all live lanes of the SIMD group have arrived; the last one completes the operation.
inline __attribute__((always_inline)) void Worker::meet(const Operation& operation) {
  if (rewrite.bytes) settle_rewrite(*this);
  Fiber& fiber = current();
  Group& group = *fiber.group;
  uint32_t bit = 1u << fiber.lane;
  if (!group.arrived) {
    group.operation = operation;
    group.first = fiber.lane;
  } else if (operation.site != group.operation.site ||
             !same_rounds(fiber, group.lanes[group.first])) {
    fiber.stray = operation;
    group.strays |= bit;
  }
  group.arrived |= bit;
  group.ready &= ~bit;
  if (group.arrived == group.live) {
    settle(group);
    if (!random && (group.ready & bit)) return;
  }
  Fiber* to = next(group);
  if (to != &fiber) resume(fiber.context, *to);
}

void Worker::interleave() {
  if (draw() & 1) return;
  Fiber& fiber = current();
  Fiber* to = next_at_random(*fiber.group);
  if (to != &fiber) resume(fiber.context, *to);
}

// True if a weak compare and exchange fails spuriously.
bool Worker::weak_fails() { return random && (draw() & 3) == 0; }

// The threadgroup has done something other than polling.
inline void Worker::go_on() {
  polls = 0;
  if (!stuck) return;
  stuck = 0;
  std::lock_guard<std::mutex> lock(run->mutex);
  ++run->round;
  run->stuck = run->stuck_rounds = 0;
}

// A thread polls memory. Other threads run from time to time. If all threadgroups have only polled
// for a long time, no progress is possible. Atomic writes set `polls` to 0 (__msl_atomic.h).
void Worker::spin() {
  if (rewrite.bytes) settle_rewrite(*this);
  Fiber& fiber = current();
  if (++fiber.spins % kSpinsBeforeYield) return;
  auto now = std::chrono::steady_clock::now();
  if (!polls) {
    go_on();
    polling_since = now;
  }
  if (polls < kPollLimit) {
    ++polls;
  } else if (run->may_grow && now - polling_since > kGrowAfter && run->next < run->end) {
    // The thread may wait for a threadgroup that has not begun.
    polling_since = now;
    std::lock_guard<std::mutex> lock(run->mutex);
    run->grows = true;
    run->finished.notify_one();
  } else if (now - polling_since > kPollTimeLimit) {
    const bool all_stuck = run->all_stuck(stuck);
    if (!all_stuck) std::this_thread::yield();
    // The thread waits for a threadgroup that stopped at a fault or was never started.
    if (all_stuck && run->end < run->threadgroups) abandon();
    if (all_stuck) {
      fail(FAULT_NO_PROGRESS, fiber.site,
           "thread %u has polled atomic memory for %lld s, and no other thread has made progress "
           "in that time",
           fiber.index, static_cast<long long>(kPollTimeLimit.count()));
    }
  }
  Fiber* to = nullptr;
  for (uint32_t i = 1; i <= threads && !to; ++i) {
    Fiber& other = fibers[(fiber.index + i) % threads];
    if (other.group->ready >> other.lane & 1) to = &other;
  }
  if (to != &fiber) resume(fiber.context, *to);
}

void Worker::release_barrier() {
  for (uint32_t i = 0; i < group_count; ++i) {
    end_matrix_accesses(groups[i]);
    groups[i].ready |= groups[i].at_barrier;
    groups[i].at_barrier = 0;
  }
  waiting = 0;
  go_on();
  if (barrier_combine) {
    barrier_combine(deposits, ~0u);
    return count_tensor(*this, deposits[0], barrier_flags);
  }
  ++counters.threadgroup_barriers;
  for (uint32_t memory = 0; memory < kMemories; ++memory) {
    if (!(barrier_flags & kMemFlags[memory])) continue;
    clocks[memory].pass_barrier();
    for (uint32_t i = 0; i < group_count; ++i) groups[i].intervals[memory] = 0;
  }
  if (orders) share_order(barrier_flags);
}

void Worker::wait_at_barrier(uint32_t flags, const void* site, __msl_combine combine) {
  if (rewrite.bytes) settle_rewrite(*this);
  Fiber& fiber = current();
  Group& group = *fiber.group;
  uint32_t bit = 1u << fiber.lane;
  if (!waiting) {
    barrier_site = site;
    barrier_flags = flags;
    barrier_combine = combine;
    barrier_fiber = fiber.index;
  } else if (site != barrier_site || !same_rounds(fiber, fibers[barrier_fiber])) {
    fail(fiber, FAULT_DIVERGENT_BARRIER, fiber.site, fibers[barrier_fiber].site,
         "thread %u waits at this %s and thread %u at %s", fiber.index, barrier_name(combine),
         barrier_fiber, site != barrier_site ? "another" : "it in another round of a loop");
  }
  group.at_barrier |= bit;
  group.ready &= ~bit;
  if (++waiting == threads) {
    release_barrier();
    if (!random) return;
  }
  Fiber* to = next(group);
  if (to != &fiber) resume(fiber.context, *to);
}

void Worker::finish() {
  if (rewrite.bytes) settle_rewrite(*this);
  Fiber& fiber = current();
  Group& group = *fiber.group;
  uint32_t bit = 1u << fiber.lane;
  go_on();
  group.live &= ~bit;
  group.ready &= ~bit;
  if (--live == 0) {
    for (uint32_t i = 0; i < group_count; ++i) end_matrix_accesses(groups[i]);
    switch_context(&fiber.context, &host);
  }
  if (group.arrived && group.arrived == group.live) settle(group);
  Fiber* to = next(group);
  if (to->started) {
    free_stack[free_stacks++] = fiber.stack;
    resume(fiber.context, *to);
  }
  // A thread that has not started takes over this stack.
  to->started = true;
  to->stack = fiber.stack;
  running = to;
}

void Worker::run_fibers() {
  Fiber* first = next(groups[0]);
  stopped_by = 0;
  in_fiber = true;
  resume(host, *first);
  in_fiber = false;
  go_on();
  report_signal();
}

namespace {

const __msl_exchange* deposit(Worker& worker, const Operation& operation, unsigned long low,
                              unsigned long high) {
  const Fiber& fiber = worker.current();
  Group& group = *fiber.group;
  __msl_slot& slot = group.exchanges[group.parity].lanes[fiber.lane];
  memcpy(slot.bytes, &low, 8);
  memcpy(slot.bytes + 8, &high, 8);
  worker.meet(operation);
  return &group.exchanges[group.parity ^ 1];
}

const __msl_exchange* engine_exchange(__msl_combine combine, unsigned long low, unsigned long high,
                                      unsigned operation, const void* site) {
  return deposit(this_worker(), {site, combine, operation}, low, high);
}

const __msl_exchange* engine_broadcast(unsigned long low, unsigned long high, unsigned lane,
                                       unsigned width, const void* site) {
  Worker& worker = this_worker();
  Fiber& fiber = worker.current();
  Group& group = *fiber.group;
  fiber.broadcast[group.parity] = lane;
  const __msl_exchange* box = deposit(worker, {site, nullptr, MSL_SHUFFLE}, low, high);
  // The first active lane of this lane's `width` lanes decides.
  uint32_t begin = fiber.lane / width * width;
  uint32_t first = begin + lowest(box->mask >> begin);
  uint32_t source = group.lanes[first].broadcast[box - group.exchanges];
  if (source != lane) {
    worker.fail(FAULT_SIMD_LANE, fiber.site,
                "in one broadcast, lane %u reads lane %u and lane %u reads lane %u", fiber.lane,
                lane, first, source);
  }
  return box;
}

__msl_pair engine_matrix(__msl_combine combine, __msl_pair a, __msl_pair b, __msl_pair c,
                         const void* site) {
  Worker& worker = this_worker();
  Fiber& fiber = worker.current();
  __msl_matrices& matrices = *fiber.group->matrices;
  matrices.a[fiber.pair] = a;
  matrices.b[fiber.pair] = b;
  matrices.c[fiber.pair] = c;
  worker.meet({site, combine, MSL_MATRIX});
  return matrices.d[fiber.pair];
}

void* engine_operands() {
  Fiber& fiber = this_worker().current();
  return &fiber.group->matrices->a[fiber.pair];
}

void engine_products(const __msl_product* products, unsigned count, const void* site) {
  this_worker().meet({site, nullptr, MSL_MATRIX, 0, products, count});
}

void engine_access_matrix(const void* site) { this_worker().access_matrix(site); }

void engine_threadgroup_barrier(unsigned flags, const void* site) {
  this_worker().wait_at_barrier(flags, site, nullptr);
}

void engine_simdgroup_barrier(unsigned flags, const void* site) {
  this_worker().meet({site, nullptr, MSL_SIMDGROUP_BARRIER, flags});
}

void engine_spin() { this_worker().spin(); }

unsigned engine_weak_fails() { return this_worker().weak_fails(); }

void engine_fence(unsigned flags, unsigned local) { this_worker().pass_fence(flags, local != 0); }

void engine_observe(const void* address) {
  Worker& worker = this_worker();
  if (worker.run->messages.any()) worker.observe(address);
}

void engine_tensor(__msl_combine combine, void* elements, const __msl_tensor_operation* operation,
                   unsigned is_further, const void* site) {
  Worker& worker = this_worker();
  Fiber& fiber = worker.current();
  Group& group = *fiber.group;
  begin_tensor(worker, *operation);
  uint32_t simdgroups = operation->simdgroups;
  __msl_slot& slot = simdgroups > 1 ? worker.deposits[fiber.index]
                                    : group.exchanges[group.parity].lanes[fiber.lane];
  memcpy(slot.bytes, &elements, sizeof elements);
  memcpy(slot.bytes + 8, &operation, sizeof operation);
  if (simdgroups > 1)
    worker.wait_at_barrier(is_further, site, combine);
  else
    worker.meet({site, combine, MSL_TENSOR, is_further});
}

const __msl_lane_map* engine_lane_map(unsigned operand, unsigned is_transposed, unsigned rows,
                                      unsigned columns, unsigned simdgroups) {
  return this_worker().lane_maps.find({operand, is_transposed, rows, columns, simdgroups});
}

void engine_count(unsigned what, unsigned n) { this_worker().counters.operations[what] += n; }

}  // namespace

const __msl_engine kEngine = {engine_matrix,
                              engine_operands,
                              engine_products,
                              engine_exchange,
                              engine_threadgroup_barrier,
                              engine_simdgroup_barrier,
                              engine_threadgroup_memory,
                              engine_spin,
                              engine_enter,
                              engine_access,
                              engine_count,
                              engine_fence,
                              engine_observe,
                              engine_endless,
                              engine_undefined,
                              engine_broadcast,
                              engine_private_access,
                              engine_lane_map,
                              engine_tensor,
                              engine_access_matrix,
                              engine_weak_fails};

}  // namespace metal_attn::simulator
