// A dispatch from request to result: validation, the order of threadgroups, and the workers.
#include "run.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "permutation.h"
#include "region.h"
#include "worker.h"

namespace metal_attn::simulator {
namespace {

enum Status { kDone = 0, kFault = 1, kBadRequest = 2, kInterrupted = 3 };

// The time between two checks for signals, which take the interpreter's lock.
constexpr std::chrono::milliseconds kSignalInterval{50};
// The time between two attempts to stop host threads.
constexpr std::chrono::milliseconds kStopInterval{1};
// The largest number of host threads that `grow` may reach, even if the caller asks for fewer.
constexpr size_t kMostGrown = 64;
// A run is stuck after so many consecutive rounds in which all threadgroups are stuck. A
// threadgroup whose wait has ended is not stuck in the following rounds.
constexpr uint32_t kStuckRounds = 128;

// Releases the interpreter's lock for its lifetime.
class Unlocked {
 public:
  explicit Unlocked(const SimulatorInterpreter* interpreter) : interpreter_(interpreter) {
    if (interpreter_) thread_ = interpreter_->save_thread();
  }
  ~Unlocked() {
    if (interpreter_) interpreter_->restore_thread(thread_);
  }
  // True if a signal handler has raised an exception.
  bool interrupted() {
    if (!interpreter_) return false;
    interpreter_->restore_thread(thread_);
    bool raised = interpreter_->check_signals() != 0;
    thread_ = interpreter_->save_thread();
    return raised;
  }

 private:
  const SimulatorInterpreter* interpreter_;
  void* thread_ = nullptr;
};

// The names of threadgroup arguments in messages: "[[threadgroup(0)]]" and so on.
const auto kArgumentNames = [] {
  std::array<std::string, SIMULATOR_MAX_ARGUMENTS> names;
  for (size_t i = 0; i < names.size(); ++i) names[i] = "[[threadgroup(" + std::to_string(i) + ")]]";
  return names;
}();

void add(SimulatorCounters& total, const SimulatorCounters& part) {
  static_assert(sizeof(SimulatorCounters) % sizeof(uint64_t) == 0);
  uint64_t most = std::max(total.threadgroup_bytes, part.threadgroup_bytes);
  auto sum = reinterpret_cast<uint64_t*>(&total);
  auto more = reinterpret_cast<const uint64_t*>(&part);
  for (size_t i = 0; i < sizeof total / sizeof *sum; ++i) sum[i] += more[i];
  total.threadgroup_bytes = most;
}

void work(Run& run, Worker& worker) {
  guard_thread(worker);
  const SimulatorDispatch& dispatch = *run.dispatch;
  const uint32_t* grid = run.launch.threadgroups;
  for (;;) {
    uint64_t order = run.next.fetch_add(1, std::memory_order_relaxed);
    if (order >= run.end.load(std::memory_order_relaxed)) break;
    uint64_t index = dispatch.seed ? shuffled(order, run.threadgroups, dispatch.seed) : order;
    const uint32_t position[3] = {static_cast<uint32_t>(index % grid[0]),
                                  static_cast<uint32_t>(index / grid[0] % grid[1]),
                                  static_cast<uint32_t>(index / grid[0] / grid[1])};
    uint64_t random = dispatch.seed ? mix(dispatch.seed ^ mix(index)) | 1 : 0;  // 0: no shuffling
    worker.run_threadgroup(position, order, random);
  }
  std::lock_guard<std::mutex> lock(run.mutex);
  add(run.counters, worker.counters);
  --run.working;
  run.finished.notify_one();
}

// Starts one more host thread, because the running threadgroups may wait for one that has not
// begun: a GPU runs several threadgroups at once.
void grow(Run& run, Regions& regions, std::vector<std::thread>& threads) {
  Worker* worker = threads.size() < kMostGrown ? regions.take(run) : nullptr;
  std::lock_guard<std::mutex> lock(run.mutex);
  run.grows = false;
  if (worker && run.working) try {
      threads.emplace_back([&run, worker] { work(run, *worker); });
      ++run.working;
      return;
    } catch (const std::system_error&) {}
  run.may_grow = false;
}

// Runs all threadgroups on new threads, so that the caller can check for signals in the meantime.
// Returns false if a signal has interrupted the run.
bool work_together(Run& run, Regions& regions, const std::vector<Worker*>& workers,
                   Unlocked& unlocked) {
  SignalHandlers handlers;
  run.working = static_cast<uint32_t>(workers.size());
  std::vector<std::thread> threads;
  for (Worker* worker : workers) {
    try {
      threads.emplace_back([&run, worker] { work(run, *worker); });
    } catch (const std::system_error&) {  // the threads that have started do all the work
      if (threads.empty()) throw std::runtime_error("the system starts no more threads");
      std::lock_guard<std::mutex> lock(run.mutex);
      run.working -= static_cast<uint32_t>(workers.size() - threads.size());
      break;
    }
  }
  bool stopping = false;
  std::unique_lock<std::mutex> lock(run.mutex);
  while (run.working) {
    run.finished.wait_for(lock, stopping ? kStopInterval : kSignalInterval);
    if (!run.working) break;
    const bool grows = run.grows;
    lock.unlock();
    if (grows) grow(run, regions, threads);
    stopping = stopping || unlocked.interrupted();
    if (stopping) {
      run.end.store(0, std::memory_order_relaxed);
      for (std::thread& thread : threads) pthread_kill(thread.native_handle(), kStopSignal);
    }
    lock.lock();
  }
  lock.unlock();
  for (std::thread& thread : threads) thread.join();
  return !stopping;
}

int reject(SimulatorFaultReport* fault, const char* format, unsigned long long value = 0) {
  snprintf(fault->message, sizeof fault->message, format, value);
  return kBadRequest;
}

// Fills the state that all threadgroups share. Returns kDone if the request is valid.
int prepare(Run& run, SimulatorFaultReport* fault) {
  const SimulatorDispatch& dispatch = *run.dispatch;
  if (dispatch.buffer_count > SIMULATOR_MAX_ARGUMENTS)
    return reject(fault, "there are %llu buffers; at most 31 are allowed", dispatch.buffer_count);
  uint64_t threads = 1;
  run.threadgroups = 1;
  for (int i = 0; i < 3; ++i) {
    uint64_t nominal = dispatch.threads_per_threadgroup[i];
    uint64_t grid = dispatch.threads_per_grid[i];
    if (nominal == 0 || nominal > kMaxThreads || (threads *= nominal) > kMaxThreads)
      return reject(fault,
                    "a threadgroup must have 1 to 1024 threads in total; one dimension has %llu",
                    nominal);
    if (grid > ~0u)
      return reject(
          fault, "the grid has %llu threads in one dimension; it must have at most 2^32 - 1", grid);
    uint64_t groups = (grid + nominal - 1) / nominal;
    // Checked runs number threadgroups in 32 bits.
    if (groups && run.threadgroups > (uint64_t{1} << (dispatch.checked ? 32 : 62)) / groups)
      return reject(fault, "the grid is too large");
    run.threadgroups *= groups;
    run.launch.dispatch_threads[i] = static_cast<uint32_t>(nominal);
    run.launch.threadgroups[i] = static_cast<uint32_t>(groups);
    run.launch.grid[i] = static_cast<uint32_t>(grid);
  }
  for (uint32_t i = 0; i < dispatch.buffer_count; ++i) {
    const SimulatorBuffer& buffer = dispatch.buffers[i];
    if (buffer.index >= SIMULATOR_MAX_ARGUMENTS)
      return reject(fault, "a buffer's index is %llu; it must be 0 to 30", buffer.index);
    if (buffer.offset > buffer.bytes)
      return reject(fault, "the offset of buffer(%llu) is past its storage's end", buffer.index);
    run.launch.buffers[buffer.index] = static_cast<char*>(buffer.storage) + buffer.offset;
  }
  return kDone;
}

// Returns false and sets `fault` if the threadgroup arguments alone exceed the limit.
bool arguments_fit(const SimulatorDispatch& dispatch, SimulatorFaultReport* fault) {
  uint64_t total = 0;
  for (uint64_t bytes : dispatch.threadgroup_argument_bytes)
    total = (total + 15) / 16 * 16 + std::min<uint64_t>(bytes, Arena::kLimit + 1);
  if (total <= Arena::kLimit) return true;
  fault->kind = FAULT_THREADGROUP_MEMORY;
  snprintf(fault->message, sizeof fault->message,
           "the threadgroup arguments exceed the limit of %u bytes of threadgroup memory",
           Arena::kLimit);
  return false;
}

}  // namespace

void Worker::run_threadgroup(const uint32_t position[3], uint64_t place, uint64_t seed) {
  const SimulatorDispatch& dispatch = *run->dispatch;
  order = place;
  random = seed;
  failed = false;
  rewrite.bytes = 0;
  threads = 1;
  for (int i = 0; i < 3; ++i) {
    uint64_t begin = uint64_t{position[i]} * dispatch.threads_per_threadgroup[i];
    uint64_t left = dispatch.threads_per_grid[i] - begin;
    launch.position[i] = position[i];
    launch.threads[i] = left < dispatch.threads_per_threadgroup[i]
                            ? static_cast<uint32_t>(left)
                            : dispatch.threads_per_threadgroup[i];
    threads *= launch.threads[i];
  }
  group_count = (threads + MSL_SIMD_WIDTH - 1) / MSL_SIMD_WIDTH;
  launch.simdgroups = group_count;
  live = threads;
  waiting = 0;
  steps = step_limit;
  stacks_used = 0;
  free_stacks = 0;
  arena.clear();
  if (clocks[kThreadgroupMemory].runs_out()) {
    shadow.forget();
    clocks[kThreadgroupMemory] = {};
  }
  const uint32_t* grid = launch.threadgroups;
  for (Clock& clock : clocks)
    clock.begin_threadgroup(position[0] + grid[0] * (position[1] + grid[1] * position[2]));
  for (uint32_t i = 0; i < SIMULATOR_MAX_ARGUMENTS; ++i) {
    uint64_t bytes = dispatch.threadgroup_argument_bytes[i];
    launch.threadgroup_memory[i] =
        bytes ? arena.get(kArgumentNames[i].c_str(), bytes, 16) : nullptr;
  }

  for (uint32_t i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    const uint32_t row = i / launch.threads[0];
    fiber.position[0] = i % launch.threads[0];
    fiber.position[1] = row % launch.threads[1];
    fiber.position[2] = row / launch.threads[1];
    fiber.started = false;
    fiber.spins = 0;
    fiber.place = fiber.depth = fiber.matrix_accesses = 0;
    fiber.site = kNoSite;
    for (uint32_t& interval : fiber.after_fence) interval = 0;
    if (orders) orders[i] = {};
  }
  for (uint32_t i = 0; i < group_count; ++i) {
    Group& group = groups[i];
    uint32_t lanes = threads - i * MSL_SIMD_WIDTH;
    bool whole = lanes >= MSL_SIMD_WIDTH;
    group.full = group.live = group.ready = whole ? ~0u : (1u << lanes) - 1;
    group.arrived = group.at_barrier = 0;
    group.strays = group.matrix_accesses = 0;
    for (uint32_t& interval : group.intervals) interval = 0;
    // In a partial SIMD group, the deposits of lanes that do not exist are NaN.
    if (!whole) {
      memset(group.exchanges, 0xFF, sizeof group.exchanges);
      memset(group.matrices, 0xFF, sizeof group.matrices);
    }
  }

  run_fibers();
  most_stacks = std::max(most_stacks, stacks_used);
  ++counters.threadgroups;
  counters.threadgroup_bytes = std::max<uint64_t>(counters.threadgroup_bytes, arena.used());
}

void Run::record(uint64_t order, const SimulatorFaultReport& report) {
  std::lock_guard<std::mutex> lock(mutex);
  if (order >= fault_order) return;
  fault_order = order;
  fault = report;
  end.store(order, std::memory_order_relaxed);
}

bool Run::all_stuck(uint32_t& last_round) {
  std::lock_guard<std::mutex> lock(mutex);
  stuck += last_round != round;
  last_round = round;
  if (stuck == working && stuck_rounds < kStuckRounds) {
    ++round;
    stuck = 0;
    ++stuck_rounds;
  }
  return stuck == working;
}

void Run::give_up(const char* why) {
  std::lock_guard<std::mutex> lock(mutex);
  reason = why;
  end.store(0, std::memory_order_relaxed);
}

static int run_dispatch(const SimulatorDispatch& dispatch, SimulatorCounters* counters,
                        SimulatorFaultReport* fault, Unlocked& unlocked) {
  Run run;
  run.dispatch = &dispatch;
  run.launch = {};
  if (int status = prepare(run, fault)) return status;
  if (run.threadgroups == 0) return kDone;
  if (!arguments_fit(dispatch, fault)) return kFault;
  if (dispatch.checked) {
    if (!run.memory.copy_in(dispatch.buffers, dispatch.buffer_count))
      return reject(fault, "there is too little address space for guarded copies of the buffers");
    for (uint32_t i = 0; i < dispatch.buffer_count; ++i)
      run.launch.buffers[dispatch.buffers[i].index] = run.memory.address(dispatch.buffers[i]);
  }
  run.kernel = reinterpret_cast<decltype(run.kernel)>(dispatch.entry);
  run.end = run.threadgroups;
  reinterpret_cast<void (*)(const void*)>(dispatch.bind)(&kEngine);

  uint64_t count = dispatch.workers ? dispatch.workers : std::thread::hardware_concurrency();
  count = std::min(std::max<uint64_t>(count, 1), run.threadgroups);
  Regions regions;
  std::vector<Worker*> workers;
  while (workers.size() < count) {
    Worker* worker = regions.take(run);
    if (!worker) break;
    workers.push_back(worker);
  }
  if (workers.empty()) return reject(fault, "there is too little memory for the threads' stacks");
  run.code = code_around(dispatch.entry);
  if (!work_together(run, regions, workers, unlocked)) return kInterrupted;
  if (run.reason) return reject(fault, run.reason);
  *counters = run.counters;
  if (run.fault.kind != FAULT_NONE) {
    *fault = run.fault;
    return kFault;
  }
  if (dispatch.checked) run.memory.copy_out();
  return kDone;
}

}  // namespace metal_attn::simulator

extern "C" int metal_attn_simulator_run(const SimulatorDispatch* dispatch,
                                        SimulatorCounters* counters, SimulatorFaultReport* fault) {
  using namespace metal_attn::simulator;
  if (!dispatch || !counters || !fault) return kBadRequest;
  *counters = {};
  *fault = {};
  fault->site = fault->other_site = kNoSite;
  try {
    Unlocked unlocked(dispatch->interpreter);
    return run_dispatch(*dispatch, counters, fault, unlocked);
  } catch (const std::exception& error) {
    snprintf(fault->message, sizeof fault->message, "%s", error.what());
    return kBadRequest;
  }
}
