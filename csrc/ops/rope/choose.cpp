#include "csrc/ops/rope/choose.h"

#include <algorithm>
#include <array>
#include <limits>

#include "csrc/ops/common/check.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

// `sizes` threads in threadgroups of up to ROPE_THREADS, filled from the first dimension on.
Grid checked_grid(const char* name, std::array<int64_t, 3> sizes) {
  Grid grid{};
  int64_t room = ROPE_THREADS;
  for (int i = 0; i < 3; ++i) {
    const int64_t threads = std::clamp<int64_t>(sizes[i], 1, room);
    const int64_t groups = divide_up(sizes[i], threads);
    room /= threads;
    check(groups * threads <= std::numeric_limits<uint32_t>::max(), name, " needs a grid of ",
          sizes[0], " x ", sizes[1], " x ", sizes[2],
          " threads, and Metal counts at most 2^32 - 1 in each dimension");
    grid.threadgroups[i] = static_cast<uint32_t>(groups);
    grid.threads[i] = static_cast<uint32_t>(threads);
  }
  return grid;
}

// The outputs are dense, so a multiple of the vector in columns aligns them.
int choose_vector(const RopeArguments& a, const RopeProblem& p) {
  int64_t vector = std::min(
      {int64_t{kMaxVector}, aligned_vector(a.q), aligned_vector(a.cos), aligned_vector(a.sin)});
  if (a.k.has_value()) {
    vector = std::min(vector, aligned_vector(*a.k));
  }
  while (vector > 1 && (p.pairs % vector != 0 || (!p.in_place && p.head_dim % vector != 0))) {
    vector /= 2;
  }
  return static_cast<int>(vector);
}

}  // namespace

RopeSpecialisation choose_rope(const RopeArguments& a, const RopeProblem& p) {
  RopeSpecialisation s{};
  s.vector = choose_vector(a, p);
  s.pair_units = p.pairs / s.vector;
  s.units = s.pair_units;
  if (!p.in_place) {
    s.units += static_cast<int32_t>(divide_up(p.head_dim - 2 * p.pairs, 2 * s.vector));
  }
  s.shares = share_heads(static_cast<double>(p.batch) * p.length * s.units, p.heads);
  if (p.launches()) {
    s.grid = checked_grid("q", {s.units, p.length, int64_t{p.batch} * s.shares.groups});
  }
  return s;
}

Defines rope_defines(const RopeProblem& p, const RopeSpecialisation& s) {
  return {
      {"ELEMENT", element_name(p.element)},
      {"TABLE_ELEMENT", element_name(p.table_element)},
      {"VECTOR", s.vector},
      {"HEADS", s.shares.heads},
      {"INTERLEAVED", p.interleaved},
      {"IN_PLACE", p.in_place},
      {"HAS_ROWS", p.row_element != nullptr},
      {"ROWS_ARE_POSITIONS", p.rows_are_positions},
      {"ROW_ELEMENT", p.row_element == nullptr ? "int" : p.row_element},
  };
}

Grid rope_tables_grid(const RopeTablesProblem& p) {
  if (!p.launches()) {
    return {};
  }
  return checked_grid("positions", {p.columns, p.sizes[2], p.sizes[0] * p.sizes[1]});
}

Defines rope_tables_defines(const RopeTablesProblem& p) {
  return {{"TABLE_ELEMENT", element_name(p.element)}, {"POSITION_ELEMENT", p.position_element}};
}

}  // namespace metal_attn
