#include "csrc/tiles/flash_bwd_tensor.h"

#include <algorithm>
#include <optional>

#include "csrc/tiles/shared.h"
#include "csrc/tiles/tensor.h"

namespace metal_attn {
namespace {

// A product takes a matrix unit about as long as so many loads of 16 bytes take a SIMD group. By
// judgement, from published rates of products.
constexpr int kProductLoads = 3;

// Spans that each of the SIMD groups has which share rows.
int own_spans(const FlashBwdSpecialisation& s, int columns) {
  return (spans(columns) + s.column_simdgroups - 1) / s.column_simdgroups;
}

// Of dq, or of dk and dv, that a SIMD group owns.
int gradient_spans(const FlashBwdSpecialisation& s) {
  return (s.qk_slice() + (s.dkv ? s.v_slice() : 0)) / kTensorSpan / s.column_simdgroups;
}

int operand_spans(const FlashBwdSpecialisation& s) {
  return own_spans(s, s.head_dim_qk) + own_spans(s, s.head_dim_v);
}

// What SIMD groups take for 16 rows of their side and 32 of the other, in loads of a thread.
int cost(const FlashBwdSpecialisation& s) {
  const int walked = operand_spans(s) + gradient_spans(s);
  const int units = unit_loads(s.element);
  const int own = s.rows_in_registers ? 0 : 2 * operand_spans(s) * units * row_loads(s);
  // Parts of scores and of their gradients, 8 bytes at a time.
  const int exchanged = s.column_simdgroups > 1 ? 2 * kTensorResult / 2 : 0;
  return s.slices * s.column_simdgroups *
         (2 * walked * kProductLoads + 4 * walked * units + own + exchanged);
}

}  // namespace

int tensor_slice(const FlashBwdSpecialisation& s, int columns) {
  const int shares = s.slices * s.column_simdgroups;
  return kTensorSpan * s.column_simdgroups * ((spans(columns) + shares - 1) / shares);
}

// The gradients and the own rows if they are held; scores, their gradients, and for dk and dv also
// the products with a span of the other side; with a cap its slope.
int tensor_registers(const FlashBwdSpecialisation& s) {
  constexpr int kOthers = 36;  // the forward's, without its running softmax
  const int held = s.rows_in_registers ? operand_spans(s) * tensor_operand(s.element) : 0;
  const int results = 2 + (s.dkv ? 1 : 0) + (s.features.score_slopes() ? 1 : 0);
  return kOthers + (gradient_spans(s) + results) * kTensorResult + held +
         2 * tensor_operand(s.element) + feature_registers(s.features);
}

int tensor_threadgroup_bytes(const FlashBwdSpecialisation& s) {
  const int votes = s.exact_delta && !s.dkv ? s.simdgroups * int(sizeof(float)) : 0;
  const int parts =
      s.column_simdgroups > 1 ? 2 * s.threads() * kTensorResult * int(sizeof(float)) : 0;
  return votes + parts;
}

FlashBwdSpecialisation choose_flash_bwd_tensor(const FlashFwdProblem& problem, bool dkv,
                                               bool exact_delta) {
  auto s = specialisation_for<FlashBwdSpecialisation>(problem);
  s.tensor_tiles = true;
  s.simdgroups = kSimdgroups;
  s.row_fragments = 2;
  s.block = kTensorSpan;
  s.wide_rotary = wide_rotary(problem);
  s.dkv = dkv;
  s.exact_delta = exact_delta;

  // The cheapest with the fewest slices, each of which computes the scores again. The narrowest is
  // taken in any case.
  const int most = std::max(spans(s.head_dim_qk), spans(s.head_dim_v));
  std::optional<FlashBwdSpecialisation> best;
  for (s.slices = 1; !best; ++s.slices) {
    for (int column_simdgroups : {1, 2}) {
      s.column_simdgroups = column_simdgroups;
      for (bool held : {true, false}) {
        s.rows_in_registers = held;
        if ((tensor_registers(s) <= kTensorRegisters || s.slices == most) &&
            (!best || cost(s) < cost(*best))) {
          best = s;
        }
      }
    }
  }
  return *best;
}

}  // namespace metal_attn
