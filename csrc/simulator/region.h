// The workers' regions of address space. They are kept for the next run: page faults in a new
// region cost more than a small run.
#pragma once

#include <memory>
#include <vector>

#include "memory.h"
#include "worker.h"

namespace metal_attn::simulator {

// Holds a worker, its threadgroup memory and its stacks, aligned so that fibers find the worker.
struct Region {
  ~Region();

  bool create();  // false if there is no memory
  Worker& begin(Run& run);

  Reservation reservation;
  Worker* worker = nullptr;
};

// The regions of one run. After it the calling host thread keeps them for its next run.
class Regions {
 public:
  ~Regions();

  // A worker for the run; null if there is no memory.
  Worker* take(Run& run);

 private:
  std::vector<std::unique_ptr<Region>> used_;
};

}  // namespace metal_attn::simulator
