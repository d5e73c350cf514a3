// Every op's schema, and what runs it on each device.
#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "csrc/ops/attention/flash_bwd.h"
#include "csrc/ops/attention/flash_bwd_bias.h"
#include "csrc/ops/attention/flash_bwd_captures.h"
#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/attention/flex_schema.h"
#include "csrc/ops/attention/schema.h"
#include "csrc/ops/cache/append_kv.h"
#include "csrc/ops/cache/copy_pages.h"
#include "csrc/ops/cache/schema.h"
#include "csrc/ops/common/check.h"
#include "csrc/ops/decode/decode_step.h"
#include "csrc/ops/decode/flash_decode.h"
#include "csrc/ops/decode/flex.h"
#include "csrc/ops/decode/schema.h"
#include "csrc/ops/merge/merge.h"
#include "csrc/ops/merge/schema.h"
#include "csrc/ops/rope/rope.h"
#include "csrc/ops/rope/schema.h"
#include "csrc/ops/softmax/schema.h"
#include "csrc/ops/softmax/softmax.h"

// The ops that compute are OP(name, arguments and the parenthesis still open, result, how the
// dispatcher's arguments become those of a function, that function, its checks). These have an
// op NAME_explain of the same arguments, too, which returns what the checks find as JSON.
#define EXPLAINED_OPS(OP)                                                                         \
  OP(flash_fwd, FLASH_CACHED_ARGUMENTS(), FLASH_FWD_RESULT, FlashFwd, dense_cached, flash_fwd,    \
     flash_fwd_explain)                                                                           \
  OP(flash_varlen_fwd, FLASH_CACHED_ARGUMENTS(PACKING_SCHEMA), FLASH_FWD_RESULT, FlashFwd,        \
     varlen_cached, flash_fwd, flash_fwd_explain)                                                 \
  OP(flash_decode, FLASH_DECODE_ARGUMENTS, FLASH_FWD_RESULT, FlashDecode, call, flash_decode,     \
     flash_decode_explain)                                                                        \
  OP(flash_bwd, FLASH_BWD_ARGUMENTS(), FLASH_BWD_RESULT, FlashBwd, dense, flash_bwd,              \
     flash_bwd_explain)                                                                           \
  OP(flash_varlen_bwd, FLASH_BWD_ARGUMENTS(PACKING_SCHEMA), FLASH_BWD_RESULT, FlashBwd, varlen,   \
     flash_bwd, flash_bwd_explain)                                                                \
  OP(flash_bwd_bias, FLASH_BWD_BIAS_ARGUMENTS(), "Tensor", FlashBwdBias, dense, flash_bwd_bias,   \
     flash_bwd_bias_explain)                                                                      \
  OP(flash_varlen_bwd_bias, FLASH_BWD_BIAS_ARGUMENTS(PACKING_SCHEMA), "Tensor", FlashBwdBias,     \
     varlen, flash_bwd_bias, flash_bwd_bias_explain)                                              \
  OP(flash_bwd_slopes, FLASH_BWD_BIAS_ARGUMENTS(), "Tensor", FlashBwdBias, dense,                 \
     flash_bwd_slopes, flash_bwd_slopes_explain)                                                  \
  OP(flash_varlen_bwd_slopes, FLASH_BWD_BIAS_ARGUMENTS(PACKING_SCHEMA), "Tensor", FlashBwdBias,   \
     varlen, flash_bwd_slopes, flash_bwd_slopes_explain)                                          \
  OP(flex_fwd, FLEX_FWD_ARGUMENTS, FLASH_FWD_RESULT, FlexFwd, call, flex_fwd, flex_fwd_explain)   \
  OP(flex_bwd, FLEX_BWD_ARGUMENTS, FLASH_BWD_RESULT, FlexBwd, call, flash_bwd, flash_bwd_explain) \
  OP(flex_bwd_captures, FLEX_BWD_CAPTURES_ARGUMENTS, "Tensor[]", FlexBwdCaptures, call,           \
     flash_bwd_captures, flash_bwd_captures_explain)                                              \
  OP(rope_tables, ROPE_TABLES_ARGUMENTS, "(Tensor cos, Tensor sin)", RopeTables, call,            \
     rope_tables, rope_tables_explain)                                                            \
  OP(merge_splits, MERGE_SPLITS_ARGUMENTS, MERGE_RESULT, MergeSplits, call, merge_splits,         \
     merge_splits_explain)

// These have none, or one of other arguments.
#define OTHER_OPS(OP)                                                                            \
  OP(decode_step, DECODE_STEP_ARGUMENTS, FLASH_FWD_RESULT, DecodeStep, call, decode_step,        \
     decode_step_explain)                                                                        \
  OP(rope, ROPE_ARGUMENTS, "(Tensor q_rotated, Tensor k_rotated)", Rope, call, rope, rope_check) \
  OP(rope_, ROPE_INPLACE_ARGUMENTS, "()", Rope, call, rope_inplace, rope_inplace_check)          \
  OP(merge_state, MERGE_STATE_ARGUMENTS, MERGE_RESULT, MergeState, call, merge_state,            \
     merge_state_check)                                                                          \
  OP(merge_state_, MERGE_STATE_INPLACE_ARGUMENTS, "()", MergeStateInplace, call,                 \
     merge_state_inplace, merge_state_inplace_check)                                             \
  OP(softmax, SOFTMAX_ARGUMENTS, "Tensor", Softmax, call, softmax, softmax_check)                \
  OP(softmax_, SOFTMAX_INPLACE_ARGUMENTS, "Tensor(a!)", Softmax, call, softmax_inplace,          \
     softmax_inplace_check)                                                                      \
  OP(apply_causal_mask_, CAUSAL_MASK_INPLACE_ARGUMENTS, "Tensor(a!)", Softmax, call,             \
     apply_causal_mask_inplace, apply_causal_mask_explain)                                       \
  OP(append_kv, APPEND_KV_ARGUMENTS, "()", AppendKv, call, append_kv, append_kv_explain)         \
  OP(copy_pages, COPY_PAGES_ARGUMENTS, "()", CopyPages, call, copy_pages, copy_pages_explain)

#define OPS(OP)     \
  EXPLAINED_OPS(OP) \
  OTHER_OPS(OP)

// The other ops that return JSON, as EXPLAIN(name, arguments and the parenthesis still open, how
// they become a function's, that function).
#define OTHER_EXPLAINS(EXPLAIN)                                                              \
  EXPLAIN(decode_step_explain, DECODE_STEP_EXPLAIN_ARGUMENTS, DecodeStep, call,              \
          decode_step_explain)                                                               \
  EXPLAIN(flash_bwd_plan, FLASH_FWD_ARGUMENTS(), FlashFwd, dense, flash_bwd_plan)            \
  EXPLAIN(flash_varlen_bwd_plan, FLASH_FWD_ARGUMENTS(PACKING_SCHEMA), FlashFwd, varlen,      \
          flash_bwd_plan)                                                                    \
  EXPLAIN(flex_bwd_plan, FLEX_FWD_ARGUMENTS, FlexBwdPlan, call, flex_bwd_plan)               \
  EXPLAIN(rope_explain, ROPE_EXPLAIN_ARGUMENTS, RopeExplain, call, rope_explain)             \
  EXPLAIN(merge_state_explain, MERGE_STATE_EXPLAIN_ARGUMENTS, MergeStateExplain, call,       \
          merge_state_explain)                                                               \
  EXPLAIN(softmax_explain, SOFTMAX_EXPLAIN_ARGUMENTS, SoftmaxExplain, call, softmax_explain) \
  EXPLAIN(apply_causal_mask_explain, CAUSAL_MASK_ARGUMENTS, Softmax, call,                   \
          apply_causal_mask_explain)                                                         \
  EXPLAIN(append_kv_explain, APPEND_KV_EXPLAIN_ARGUMENTS, AppendKv, call, append_kv_explain) \
  EXPLAIN(copy_pages_explain, COPY_PAGES_EXPLAIN_ARGUMENTS, CopyPages, call, copy_pages_explain)

namespace metal_attn {
namespace {

using torch::stable::Tensor;

// The tensor whose device a message names.
const Tensor& first(const Tensor& tensor) { return tensor; }
const Tensor& first(const FlashFwdArguments& a) { return a.q; }
const Tensor& first(const FlashBwdArguments& a) { return a.forward.q; }
const Tensor& first(const FlashBwdBiasArguments& a) { return a.forward.q; }
const Tensor& first(const FlashDecodeArguments& a) { return a.forward.q; }
const Tensor& first(const DecodeStepArguments& a) { return a.decode.forward.q; }
const Tensor& first(const RopeArguments& a) { return a.q; }
const Tensor& first(const RopeTablesArguments& a) { return a.inv_freq; }
const Tensor& first(const MergeStateArguments& a) { return a.out_a; }
const Tensor& first(const MergeSplitsArguments& a) { return a.partial_out; }
const Tensor& first(const AppendKvArguments& a) { return a.k; }

void rope_check(const RopeArguments& arguments) { rope_explain(arguments, false); }
void rope_inplace_check(const RopeArguments& arguments) { rope_explain(arguments, true); }
void merge_state_check(const MergeStateArguments& arguments) {
  merge_state_explain(arguments, false, std::nullopt);
}
void merge_state_inplace_check(const MergeStateArguments& arguments, const OptionalTensor& mask) {
  merge_state_explain(arguments, true, mask);
}
void softmax_check(const Tensor& x, int64_t dim) { softmax_explain(x, dim, false); }
void softmax_inplace_check(const Tensor& x, int64_t dim) { softmax_explain(x, dim, true); }

// Each op's function, whatever its overload.
#define RUN_OF(NAME, ARGUMENTS, RESULT, FROM, FORM, RUN, CHECK)             \
  struct Run_##NAME {                                                       \
    auto operator()(auto&... arguments) const { return RUN(arguments...); } \
  };
OPS(RUN_OF)
#undef RUN_OF

// The same on a backend. Its name is in the symbols that .ci/check_library.py looks for.
template <Backend& (*backend)(), class Function>
struct On {
  auto operator()(const auto&... arguments) const { return Function()(arguments..., backend()); }
};

std::runtime_error no_kernel(const char* op, const Tensor& tensor) {
  return std::runtime_error(std::string("metal_attn::") + op + " has no kernel for " +
                            device_text(tensor).str() + ": import torch_metal_attn");
}

}  // namespace
}  // namespace metal_attn

#define DEFINE(NAME, ARGUMENTS, RESULT, ...) m.def(#NAME ARGUMENTS ") -> " RESULT);
#define DEFINE_EXPLAIN(NAME, ARGUMENTS, ...) m.def(#NAME ARGUMENTS ") -> int[]");
#define DEFINE_EXPLAINED(NAME, ARGUMENTS, ...) DEFINE_EXPLAIN(NAME##_explain, ARGUMENTS)
#define IMPLEMENT_EXPLAIN(NAME, ARGUMENTS, FROM, FORM, EXPLAIN) \
  m.impl(#NAME, TORCH_BOX(&FROM<EXPLAIN>::FORM));
#define IMPLEMENT_EXPLAINED(NAME, ARGUMENTS, RESULT, FROM, FORM, RUN, CHECK) \
  IMPLEMENT_EXPLAIN(NAME##_explain, ARGUMENTS, FROM, FORM, CHECK)
#define IMPLEMENT_ON(BACKEND, NAME, FROM, FORM) \
  m.impl(#NAME, TORCH_BOX((&FROM<On<BACKEND, Run_##NAME>{}>::FORM)));
#define IMPLEMENT_SIMULATOR(NAME, ARGUMENTS, RESULT, FROM, FORM, RUN, CHECK) \
  IMPLEMENT_ON(simulator_backend, NAME, FROM, FORM)
#define IMPLEMENT_MPS(NAME, ARGUMENTS, RESULT, FROM, FORM, RUN, CHECK) \
  IMPLEMENT_ON(mps_backend, NAME, FROM, FORM)
// For every device without a kernel of its own: the checks, and then an error.
#define IMPLEMENT_ELSEWHERE(NAME, ARGUMENTS, RESULT, FROM, FORM, RUN, CHECK)                       \
  m.impl(                                                                                          \
      #NAME,                                                                                       \
      TORCH_BOX(                                                                                   \
          (&FROM<[](const auto& argument, const auto&... others)                                   \
                     -> decltype(metal_attn::RUN(argument, others..., std::declval<Backend&>())) { \
            metal_attn::CHECK(argument, others...);                                                \
            throw no_kernel(#NAME, first(argument));                                               \
          }>::FORM)));

using namespace metal_attn;

// What users call. The CPU kernels are in torch_metal_attn/ops/: the reference, or the next one.
STABLE_TORCH_LIBRARY(metal_attn, m) {
  OPS(DEFINE);
  EXPLAINED_OPS(DEFINE_EXPLAINED);
  OTHER_EXPLAINS(DEFINE_EXPLAIN);
  m.def(APPLY_CAUSAL_MASK_TO_COPY);
}

// The shaders on CPU tensors, always.
STABLE_TORCH_LIBRARY(metal_attn_simulator, m) {
  OPS(DEFINE);
  m.def(APPLY_CAUSAL_MASK_TO_COPY);
}

STABLE_TORCH_LIBRARY_IMPL(metal_attn, CompositeExplicitAutograd, m) {
  OPS(IMPLEMENT_ELSEWHERE);
  EXPLAINED_OPS(IMPLEMENT_EXPLAINED);
  OTHER_EXPLAINS(IMPLEMENT_EXPLAIN);
}

STABLE_TORCH_LIBRARY_IMPL(metal_attn_simulator, CPU, m) { OPS(IMPLEMENT_SIMULATOR); }

#ifdef __APPLE__
STABLE_TORCH_LIBRARY_IMPL(metal_attn, MPS, m) { OPS(IMPLEMENT_MPS); }
#endif
