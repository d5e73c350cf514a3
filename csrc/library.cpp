// Registers the schema of every op, and its kernel for each device.
#include <torch/csrc/stable/library.h>

#include "csrc/ops/attention/flash_bwd.h"
#include "csrc/ops/attention/flash_bwd_bias.h"
#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/attention/flex_schema.h"
#include "csrc/ops/attention/schema.h"
#include "csrc/ops/cache/append_kv.h"
#include "csrc/ops/cache/copy_pages.h"
#include "csrc/ops/cache/schema.h"
#include "csrc/ops/decode/decode_step.h"
#include "csrc/ops/decode/fast_path.h"
#include "csrc/ops/decode/flash_decode.h"
#include "csrc/ops/decode/schema.h"
#include "csrc/ops/indexer/index_scores.h"
#include "csrc/ops/indexer/schema.h"
#include "csrc/ops/merge/merge.h"
#include "csrc/ops/merge/schema.h"
#include "csrc/ops/rope/rope.h"
#include "csrc/ops/rope/schema.h"
#include "csrc/ops/softmax/schema.h"
#include "csrc/ops/softmax/softmax.h"

// OP(name, arguments without the closing parenthesis, result, the template that converts the
// dispatcher's arguments, the function that runs the op).
#define OPS(OP)                                                                                  \
  OP(flash_fwd, FLASH_CACHED_ARGUMENTS(), FLASH_FWD_RESULT, FlashFwd, attention_fwd)             \
  OP(flash_varlen_fwd, FLASH_CACHED_ARGUMENTS(PACKING_SCHEMA), FLASH_FWD_RESULT, FlashVarlenFwd, \
     attention_fwd)                                                                              \
  OP(flash_decode, FLASH_DECODE_ARGUMENTS, FLASH_FWD_RESULT, FlashDecode, flash_decode)          \
  OP(flash_bwd, FLASH_BWD_ARGUMENTS(), FLASH_BWD_RESULT, FlashBwd, flash_bwd)                    \
  OP(flash_varlen_bwd, FLASH_BWD_ARGUMENTS(PACKING_SCHEMA), FLASH_BWD_RESULT, FlashVarlenBwd,    \
     flash_bwd)                                                                                  \
  OP(flash_bwd_bias, FLASH_BWD_BIAS_ARGUMENTS(), "Tensor", FlashBwdBias, flash_bwd_bias)         \
  OP(flash_varlen_bwd_bias, FLASH_BWD_BIAS_ARGUMENTS(PACKING_SCHEMA), "Tensor",                  \
     FlashVarlenBwdBias, flash_bwd_bias)                                                         \
  OP(flash_bwd_slopes, FLASH_BWD_BIAS_ARGUMENTS(), "Tensor", FlashBwdBias, flash_bwd_slopes)     \
  OP(flash_varlen_bwd_slopes, FLASH_BWD_BIAS_ARGUMENTS(PACKING_SCHEMA), "Tensor",                \
     FlashVarlenBwdBias, flash_bwd_slopes)                                                       \
  OP(flex_fwd, FLEX_FWD_ARGUMENTS, FLASH_FWD_RESULT, FlexFwd, attention_fwd)                     \
  OP(flex_bwd, FLEX_BWD_ARGUMENTS, FLASH_BWD_RESULT, FlexBwd, flash_bwd)                         \
  OP(flex_bwd_captures, FLEX_BWD_CAPTURES_ARGUMENTS, "Tensor[]", FlexBwdCaptures,                \
     flash_bwd_captures)                                                                         \
  OP(rope_tables, ROPE_TABLES_ARGUMENTS, "(Tensor cos, Tensor sin)", RopeTables, rope_tables)    \
  OP(merge_splits, MERGE_SPLITS_ARGUMENTS, MERGE_RESULT, MergeSplits, merge_splits)              \
  OP(decode_step, DECODE_STEP_ARGUMENTS, FLASH_FWD_RESULT, DecodeStep, decode_step)              \
  OP(rope, ROPE_ARGUMENTS, "(Tensor q_rotated, Tensor k_rotated)", Rope, rope)                   \
  OP(rope_, ROPE_INPLACE_ARGUMENTS, "()", Rope, rope_inplace)                                    \
  OP(merge_state, MERGE_STATE_ARGUMENTS, MERGE_RESULT, MergeState, merge_state)                  \
  OP(merge_state_, MERGE_STATE_INPLACE_ARGUMENTS, "()", MergeStateInplace, merge_state_inplace)  \
  OP(index_scores, INDEX_SCORES_ARGUMENTS, "Tensor", IndexScores, index_scores)                  \
  OP(softmax, SOFTMAX_ARGUMENTS, "Tensor", Softmax, softmax)                                     \
  OP(softmax_, SOFTMAX_INPLACE_ARGUMENTS, "Tensor(a!)", Softmax, softmax_inplace)                \
  OP(apply_causal_mask_, CAUSAL_MASK_INPLACE_ARGUMENTS, "Tensor(a!)", Softmax,                   \
     apply_causal_mask_inplace)                                                                  \
  OP(append_kv, APPEND_KV_ARGUMENTS, "()", AppendKv, append_kv)                                  \
  OP(copy_pages, COPY_PAGES_ARGUMENTS, "()", CopyPages, copy_pages)

namespace metal_attn {
namespace {

// The tensor whose device the message of `no_kernel` contains.
const Tensor& first_tensor(const Tensor& tensor) { return tensor; }
const Tensor& first_tensor(const FlashFwdArguments& a) { return a.q; }
const Tensor& first_tensor(const FlashBwdArguments& a) { return a.forward.q; }
const Tensor& first_tensor(const FlashBwdBiasArguments& a) { return a.forward.q; }
const Tensor& first_tensor(const FlashDecodeArguments& a) { return a.forward.q; }
const Tensor& first_tensor(const DecodeStepArguments& a) { return a.decode.forward.q; }
const Tensor& first_tensor(const RopeArguments& a) { return a.q; }
const Tensor& first_tensor(const RopeTablesArguments& a) { return a.inv_freq; }
const Tensor& first_tensor(const MergeStateArguments& a) { return a.out_a; }
const Tensor& first_tensor(const MergeSplitsArguments& a) { return a.partial_out; }
const Tensor& first_tensor(const AppendKvArguments& a) { return a.k; }
const Tensor& first_tensor(const IndexScoresArguments& a) { return a.q; }

// Each op's function as a type: a function with overloads cannot be a template argument.
#define RUN_OF(NAME, ARGUMENTS, RESULT, FROM, RUN)                          \
  struct Run_##NAME {                                                       \
    auto operator()(auto&... arguments) const { return RUN(arguments...); } \
  };
OPS(RUN_OF)
#undef RUN_OF

// Runs the function on a backend. .ci/check_library.py looks for symbols that contain this name.
template <Backend& (*backend)(), class Function>
struct On {
  auto operator()(const auto&... arguments) const { return Function()(arguments..., backend()); }
};

// Runs nothing and returns the launches as JSON.
template <class Function>
struct Recorded {
  PackedText operator()(const auto&... arguments) const {
    Recorder recorder;
    Function()(arguments..., recorder);
    return recorder.packed();
  }
};

// The schema without the marks "(a!)" of arguments that the op writes.
std::string without_writes(std::string schema) {
  for (std::size_t end; (end = schema.find("!)")) != std::string::npos;) {
    schema.erase(end - 2, 4);  // "(a!)" begins two letters before "!)"
  }
  return schema;
}

std::runtime_error no_kernel(const char* op, const Tensor& tensor) {
  return std::runtime_error(std::string("metal_attn::") + op + " has no kernel for " +
                            device_text(tensor).str() + ": import torch_metal_attn");
}

}  // namespace
}  // namespace metal_attn

#define DEFINE(NAME, ARGUMENTS, RESULT, ...) m.def(#NAME ARGUMENTS ") -> " RESULT);
#define DEFINE_RECORDED(NAME, ARGUMENTS, ...) \
  m.def(without_writes(#NAME ARGUMENTS ") -> int[]").c_str());
#define IMPLEMENT_ON(BACKEND, NAME, FROM) \
  m.impl(#NAME, TORCH_BOX((&FROM<On<BACKEND, Run_##NAME>{}>::call)));
#define IMPLEMENT_SIMULATOR(NAME, ARGUMENTS, RESULT, FROM, RUN) \
  IMPLEMENT_ON(simulator_backend, NAME, FROM)
#define IMPLEMENT_MPS(NAME, ARGUMENTS, RESULT, FROM, RUN) IMPLEMENT_ON(mps_backend, NAME, FROM)
#define IMPLEMENT_RECORDED(NAME, ARGUMENTS, RESULT, FROM, RUN) \
  m.impl(#NAME, TORCH_BOX((&FROM<Recorded<Run_##NAME>{}>::call)));
// For every device that has no kernel: runs the checks, and then throws an error.
#define IMPLEMENT_ELSEWHERE(NAME, ARGUMENTS, RESULT, FROM, RUN)                                    \
  m.impl(                                                                                          \
      #NAME,                                                                                       \
      TORCH_BOX(                                                                                   \
          (&FROM<[](const auto& argument, const auto&... others)                                   \
                     -> decltype(metal_attn::RUN(argument, others..., std::declval<Backend&>())) { \
            Recorded<Run_##NAME>()(argument, others...);                                           \
            throw no_kernel(#NAME, first_tensor(argument));                                        \
          }>::call)));

using namespace metal_attn;

// The public ops. Their CPU kernels, in torch_metal_attn/ops/, run the reference or the simulator.
STABLE_TORCH_LIBRARY(metal_attn, m) {
  OPS(DEFINE);
  m.def(APPLY_CAUSAL_MASK_TO_COPY);
}

// Runs the shaders on CPU tensors, without autograd and fake kernels.
STABLE_TORCH_LIBRARY(metal_attn_simulator, m) { OPS(DEFINE); }

// Returns the launches of the same calls, for `explain` and for the checks of fake kernels.
// Computes, allocates and writes nothing.
STABLE_TORCH_LIBRARY(metal_attn_explain, m) { OPS(DEFINE_RECORDED); }

STABLE_TORCH_LIBRARY_IMPL(metal_attn_explain, CompositeExplicitAutograd, m) {
  OPS(IMPLEMENT_RECORDED);
}

STABLE_TORCH_LIBRARY_IMPL(metal_attn, CompositeExplicitAutograd, m) { OPS(IMPLEMENT_ELSEWHERE); }

STABLE_TORCH_LIBRARY_IMPL(metal_attn_simulator, CPU, m) { OPS(IMPLEMENT_SIMULATOR); }

// Ops with few arguments. Their CPU kernels are in torch_metal_attn/ops/fast_path.py.
STABLE_TORCH_LIBRARY(metal_attn_fast, m) { define_fast_path(m); }

#ifdef __APPLE__
STABLE_TORCH_LIBRARY_IMPL(metal_attn, MPS, m) { OPS(IMPLEMENT_MPS); }
STABLE_TORCH_LIBRARY_IMPL(metal_attn_fast, MPS, m) { FastPath<mps_backend>::implement(m); }
#endif
