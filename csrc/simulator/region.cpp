#include "region.h"

#include <new>
#include <thread>

namespace metal_attn::simulator {
namespace {

// About two seconds of an empty loop.
constexpr uint64_t kStepLimit = uint64_t{1} << 28;
// Bytes below the lowest stack. A function's frame may reach them before its size is checked.
constexpr uint64_t kBelowStacks = 256 * 1024;
// A region that has used more stacks is not kept. This many stacks take up to 64 MiB, mostly 4 MiB.
constexpr uint32_t kMostStacksKept = 256;

// Regions for this host thread's next runs. They are thread-local because another thread may fork
// at any time, and because a Python signal handler may start a run during a run.
thread_local std::vector<std::unique_ptr<Region>> spare;

}  // namespace

Region::~Region() {
  if (worker) worker->~Worker();
}

bool Region::create() {
  if (!reservation.reserve(MSL_REGION_BYTES, MSL_REGION_BYTES)) return false;
  char* base = reservation.data;
  if (!reservation.allow_access(base, MSL_REGION_BYTES)) return false;
  worker = new (base) Worker();
  char* arena = base + (sizeof(Worker) + 4095) / 4096 * 4096;
  worker->arena.init(arena);
  worker->stacks = arena + (Arena::kBytes + 4095) / 4096 * 4096 + kBelowStacks;
  static_assert(sizeof(Worker) + Arena::kBytes + 8192 + kBelowStacks + kMaxThreads * kStackStride <=
                MSL_REGION_BYTES);
  for (uint32_t i = 0; i < kMaxThreads; ++i) {
    Fiber& fiber = worker->fibers[i];
    fiber.index = i;
    fiber.lane = i % MSL_SIMD_WIDTH;
    fiber.simdgroup = i / MSL_SIMD_WIDTH;
    fiber.group = &worker->groups[fiber.simdgroup];
    fiber.group->lanes = &worker->fibers[fiber.simdgroup * MSL_SIMD_WIDTH];
    uint32_t quad = fiber.lane / 4;
    uint32_t row = (quad & 4) + fiber.lane / 2 % 4;
    uint32_t column = (quad & 2) * 2 + fiber.lane % 2 * 2;
    fiber.pair = row * 4 + column / 2;
  }
  return worker->shadow.init(Arena::kBytes);
}

Worker& Region::begin(Run& run) {
  const SimulatorDispatch& dispatch = *run.dispatch;
  worker->run = &run;
  worker->launch = run.launch;
  worker->checked = dispatch.checked != 0;
  worker->step_limit = dispatch.step_limit ? dispatch.step_limit : kStepLimit;
  worker->counters = {};
  worker->shadow.forget();
  for (Clock& clock : worker->clocks) clock = {};
  worker->clocks[kDeviceMemory].share(&run.owners);
  worker->orders.reset();
  worker->last_slot = nullptr;
  worker->image_page = nullptr;
  worker->lane_maps = {dispatch.lane_map, dispatch.lane_map_seed};
  worker->rounds = dispatch.rounds;
  worker->is_logical = dispatch.lane_map == LANE_MAP_RANDOM && dispatch.lane_map_seed % 2;
  return *worker;
}

Worker* Regions::take(Run& run) {
  std::unique_ptr<Region> region;
  if (spare.empty()) {
    region = std::make_unique<Region>();
    if (!region->create()) return nullptr;
  } else {
    region = std::move(spare.back());
    spare.pop_back();
  }
  used_.push_back(std::move(region));
  return &used_.back()->begin(run);
}

Regions::~Regions() {
  uint32_t cores = std::thread::hardware_concurrency();
  for (std::unique_ptr<Region>& region : used_)
    if (spare.size() < cores && region->worker->most_stacks <= kMostStacksKept)
      spare.push_back(std::move(region));
}

}  // namespace metal_attn::simulator
