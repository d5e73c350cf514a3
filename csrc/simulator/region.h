// The workers' regions of address space, kept for the next run: mapping one costs more than a small
// run, as the first touch of each page is a fault.
#pragma once

#include <memory>
#include <vector>

#include "memory.h"
#include "worker.h"

namespace metal_attn::simulator {

// Holds a worker, the memory of its threadgroups and their stacks, aligned so that fibers find it.
class Region {
 public:
  Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  // False if there is no memory.
  bool create();
  // The worker, as if new.
  Worker& begin(Run& run);
  // True if its memory is worth keeping: many deep stacks would take too much.
  bool is_small() const;

 private:
  Reservation reservation_;
  Worker* worker_ = nullptr;
};

// The regions of one run. At its end the calling host thread keeps them for its next one.
class Regions {
 public:
  Regions() = default;
  Regions(const Regions&) = delete;
  Regions& operator=(const Regions&) = delete;
  ~Regions();

  // A worker for the run; null if there is no memory.
  Worker* take(Run& run);

 private:
  std::vector<std::unique_ptr<Region>> used_;
};

}  // namespace metal_attn::simulator
