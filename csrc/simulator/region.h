// The workers' regions of address space. They are kept for the next run, because page faults in a
// new region cost more than a small run.
#pragma once

#include <memory>
#include <vector>

#include "memory.h"
#include "worker.h"

namespace metal_attn::simulator {

// Holds a worker, its threadgroup memory and its stacks. The region's alignment lets a fiber
// compute the worker's address from its stack pointer.
struct Region {
  ~Region();

  bool create();  // false if there is too little memory
  Worker& begin(Run& run);

  Reservation reservation;
  Worker* worker = nullptr;
};

// The regions of one run. After the run, the calling host thread keeps them for its next run.
class Regions {
 public:
  ~Regions();

  // A worker for the run; null if there is too little memory.
  Worker* take(Run& run);

 private:
  std::vector<std::unique_ptr<Region>> used_;
};

}  // namespace metal_attn::simulator
