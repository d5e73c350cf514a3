// Every op's schema, and what runs it on each device.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

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
#include "csrc/ops/decode/flex.h"
#include "csrc/ops/decode/schema.h"
#include "csrc/ops/merge/merge.h"
#include "csrc/ops/merge/schema.h"
#include "csrc/ops/rope/rope.h"
#include "csrc/ops/rope/schema.h"
#include "csrc/ops/softmax/schema.h"
#include "csrc/ops/softmax/softmax.h"

namespace {

using metal_attn::append_kv_op;
using metal_attn::AppendKvArguments;
using metal_attn::Backend;
using metal_attn::decode_step_op;
using metal_attn::DecodeStepArguments;
using metal_attn::FlashBwd;
using metal_attn::FlashBwdArguments;
using metal_attn::FlashBwdBias;
using metal_attn::FlashBwdBiasArguments;
using metal_attn::FlashDecode;
using metal_attn::FlashDecodeArguments;
using metal_attn::FlashFwd;
using metal_attn::FlashFwdArguments;
using metal_attn::FlexBwd;
using metal_attn::FlexBwdCaptures;
using metal_attn::FlexBwdPlan;
using metal_attn::FlexFwd;
using metal_attn::kAppendKv;
using metal_attn::kAppendKvExplain;
using metal_attn::kApplyCausalMask;
using metal_attn::kApplyCausalMaskExplain;
using metal_attn::kApplyCausalMaskToCopy;
using metal_attn::kCopyPages;
using metal_attn::kCopyPagesExplain;
using metal_attn::kDecodeStep;
using metal_attn::kDecodeStepExplain;
using metal_attn::kFlashBwd;
using metal_attn::kFlashBwdBias;
using metal_attn::kFlashBwdBiasExplain;
using metal_attn::kFlashBwdExplain;
using metal_attn::kFlashBwdPlan;
using metal_attn::kFlashBwdSlopes;
using metal_attn::kFlashBwdSlopesExplain;
using metal_attn::kFlashDecode;
using metal_attn::kFlashDecodeExplain;
using metal_attn::kFlashFwd;
using metal_attn::kFlashFwdExplain;
using metal_attn::kFlashVarlenBwd;
using metal_attn::kFlashVarlenBwdBias;
using metal_attn::kFlashVarlenBwdBiasExplain;
using metal_attn::kFlashVarlenBwdExplain;
using metal_attn::kFlashVarlenBwdPlan;
using metal_attn::kFlashVarlenBwdSlopes;
using metal_attn::kFlashVarlenBwdSlopesExplain;
using metal_attn::kFlashVarlenFwd;
using metal_attn::kFlashVarlenFwdExplain;
using metal_attn::kFlexBwd;
using metal_attn::kFlexBwdCaptures;
using metal_attn::kFlexBwdCapturesExplain;
using metal_attn::kFlexBwdExplain;
using metal_attn::kFlexBwdPlan;
using metal_attn::kFlexFwd;
using metal_attn::kFlexFwdExplain;
using metal_attn::kMergeSplits;
using metal_attn::kMergeSplitsExplain;
using metal_attn::kMergeState;
using metal_attn::kMergeStateExplain;
using metal_attn::kMergeStateInplace;
using metal_attn::kRope;
using metal_attn::kRopeExplain;
using metal_attn::kRopeInplace;
using metal_attn::kRopeTables;
using metal_attn::kRopeTablesExplain;
using metal_attn::kSoftmax;
using metal_attn::kSoftmaxExplain;
using metal_attn::kSoftmaxInplace;
using metal_attn::merge_splits_op;
using metal_attn::merge_state_op;
using metal_attn::MergeSplitsArguments;
using metal_attn::MergeStateArguments;
using metal_attn::rope_op;
using metal_attn::rope_tables_op;
using metal_attn::RopeArguments;
using metal_attn::RopeTablesArguments;
using torch::stable::Tensor;

template <Backend& (*backend)()>
std::tuple<Tensor, Tensor> flash_fwd(const FlashFwdArguments& arguments) {
  return metal_attn::flash_fwd(arguments, backend());
}

template <Backend& (*backend)()>
std::tuple<Tensor, Tensor> flex_fwd(const FlashFwdArguments& arguments) {
  return metal_attn::flex_fwd(arguments, backend());
}

template <Backend& (*backend)()>
std::tuple<Tensor, Tensor> flash_decode(const FlashDecodeArguments& arguments) {
  return metal_attn::flash_decode(arguments, backend());
}

template <Backend& (*backend)()>
std::tuple<Tensor, Tensor> decode_step(const DecodeStepArguments& arguments) {
  return metal_attn::decode_step(arguments, backend());
}

template <Backend& (*backend)()>
metal_attn::FlashGradients flash_bwd(const FlashBwdArguments& arguments) {
  return metal_attn::flash_bwd(arguments, backend());
}

template <Backend& (*backend)()>
Tensor flash_bwd_bias(const FlashBwdBiasArguments& arguments) {
  return metal_attn::flash_bwd_bias(arguments, backend());
}

template <Backend& (*backend)()>
Tensor flash_bwd_slopes(const FlashBwdBiasArguments& arguments) {
  return metal_attn::flash_bwd_slopes(arguments, backend());
}

template <Backend& (*backend)()>
std::vector<Tensor> flash_bwd_captures(const FlashBwdBiasArguments& arguments) {
  return metal_attn::flash_bwd_captures(arguments, backend());
}

template <Backend& (*backend)()>
Tensor softmax(const Tensor& x, int64_t dim) {
  return metal_attn::softmax(x, dim, backend());
}

template <Backend& (*backend)()>
Tensor softmax_inplace(const Tensor& x, int64_t dim) {
  metal_attn::softmax_inplace(x, dim, backend());
  return x;
}

template <Backend& (*backend)()>
Tensor apply_causal_mask_inplace(const Tensor& scores, int64_t q_offset) {
  metal_attn::apply_causal_mask_inplace(scores, q_offset, backend());
  return scores;
}

// For every device without a kernel of its own.
std::runtime_error no_kernel(const char* op, const Tensor& tensor) {
  return std::runtime_error(std::string("metal_attn::") + op + " has no kernel for " +
                            metal_attn::device_text(tensor).str() + ": import torch_metal_attn");
}

std::tuple<Tensor, Tensor> flash_fwd_elsewhere(const FlashFwdArguments& arguments) {
  metal_attn::flash_fwd_explain(arguments);
  throw no_kernel("flash_fwd", arguments.q);
}

metal_attn::FlashGradients flash_bwd_elsewhere(const FlashBwdArguments& arguments) {
  metal_attn::flash_bwd_explain(arguments);
  throw no_kernel("flash_bwd", arguments.forward.q);
}

template <Backend& (*backend)()>
std::tuple<Tensor, Tensor> rope(const RopeArguments& arguments) {
  return metal_attn::rope(arguments, backend());
}

template <Backend& (*backend)()>
void rope_inplace(const RopeArguments& arguments) {
  metal_attn::rope_inplace(arguments, backend());
}

template <Backend& (*backend)()>
std::tuple<Tensor, Tensor> rope_tables(const RopeTablesArguments& arguments) {
  return metal_attn::rope_tables(arguments, backend());
}

using MergeResult = std::tuple<Tensor, Tensor>;

template <Backend& (*backend)()>
MergeResult merge_state(const MergeStateArguments& arguments) {
  return metal_attn::merge_state(arguments, backend());
}

template <Backend& (*backend)()>
void merge_state_inplace(const MergeStateArguments& arguments, const std::optional<Tensor>& mask) {
  metal_attn::merge_state_inplace(arguments, mask, backend());
}

template <Backend& (*backend)()>
MergeResult merge_splits(const MergeSplitsArguments& arguments) {
  return metal_attn::merge_splits(arguments, backend());
}

template <Backend& (*backend)()>
void append_kv(const AppendKvArguments& arguments) {
  metal_attn::append_kv(arguments, backend());
}

template <Backend& (*backend)()>
void copy_pages(const Tensor& cache, const Tensor& src, const Tensor& dst) {
  metal_attn::copy_pages(cache, src, dst, backend());
}

std::tuple<Tensor, Tensor> flash_decode_elsewhere(const FlashDecodeArguments& arguments) {
  metal_attn::flash_decode_explain(arguments);
  throw no_kernel("flash_decode", arguments.forward.q);
}

std::tuple<Tensor, Tensor> decode_step_elsewhere(const DecodeStepArguments& arguments) {
  metal_attn::decode_step_explain(arguments);
  throw no_kernel("decode_step", arguments.decode.forward.q);
}

Tensor flash_bwd_bias_elsewhere(const FlashBwdBiasArguments& arguments) {
  metal_attn::flash_bwd_bias_explain(arguments);
  throw no_kernel("flash_bwd_bias", arguments.forward.q);
}

Tensor flash_bwd_slopes_elsewhere(const FlashBwdBiasArguments& arguments) {
  metal_attn::flash_bwd_slopes_explain(arguments);
  throw no_kernel("flash_bwd_slopes", arguments.forward.q);
}

std::vector<Tensor> flash_bwd_captures_elsewhere(const FlashBwdBiasArguments& arguments) {
  metal_attn::flash_bwd_captures_explain(arguments);
  throw no_kernel("flex_bwd_captures", arguments.forward.q);
}

std::tuple<Tensor, Tensor> rope_elsewhere(const RopeArguments& arguments) {
  metal_attn::rope_explain(arguments, false);
  throw no_kernel("rope", arguments.q);
}

void rope_inplace_elsewhere(const RopeArguments& arguments) {
  metal_attn::rope_explain(arguments, true);
  throw no_kernel("rope_", arguments.q);
}

std::tuple<Tensor, Tensor> rope_tables_elsewhere(const RopeTablesArguments& arguments) {
  metal_attn::rope_tables_explain(arguments);
  throw no_kernel("rope_tables", arguments.inv_freq);
}

MergeResult merge_state_elsewhere(const MergeStateArguments& arguments) {
  metal_attn::merge_state_explain(arguments, false, std::nullopt);
  throw no_kernel("merge_state", arguments.out_a);
}

void merge_state_inplace_elsewhere(const MergeStateArguments& arguments,
                                   const std::optional<Tensor>& mask) {
  metal_attn::merge_state_explain(arguments, true, mask);
  throw no_kernel("merge_state_", arguments.out_a);
}

MergeResult merge_splits_elsewhere(const MergeSplitsArguments& arguments) {
  metal_attn::merge_splits_explain(arguments);
  throw no_kernel("merge_splits", arguments.partial_out);
}

void append_kv_elsewhere(const AppendKvArguments& arguments) {
  metal_attn::append_kv_explain(arguments);
  throw no_kernel("append_kv", arguments.k);
}

void copy_pages_elsewhere(const Tensor& cache, const Tensor& src, const Tensor& dst) {
  metal_attn::copy_pages_explain(cache, src, dst);
  throw no_kernel("copy_pages", cache);
}

template <bool in_place>
Tensor softmax_elsewhere(const Tensor& x, int64_t dim) {
  metal_attn::softmax_explain(x, dim, in_place);
  throw no_kernel(in_place ? "softmax_" : "softmax", x);
}

Tensor apply_causal_mask_elsewhere(const Tensor& scores, int64_t q_offset) {
  metal_attn::apply_causal_mask_explain(scores, q_offset);
  throw no_kernel("apply_causal_mask_", scores);
}

}  // namespace

// What users call. The CPU kernels are in torch_metal_attn/ops/: the reference, or the next one.
STABLE_TORCH_LIBRARY(metal_attn, m) {
  m.def(kFlashFwd);
  m.def(kFlashVarlenFwd);
  m.def(kFlashFwdExplain);
  m.def(kFlashVarlenFwdExplain);
  m.def(kFlashDecode);
  m.def(kFlashDecodeExplain);
  m.def(kDecodeStep);
  m.def(kDecodeStepExplain);
  m.def(kFlashBwd);
  m.def(kFlashVarlenBwd);
  m.def(kFlashBwdExplain);
  m.def(kFlashVarlenBwdExplain);
  m.def(kFlashBwdPlan);
  m.def(kFlashVarlenBwdPlan);
  m.def(kFlashBwdBias);
  m.def(kFlashVarlenBwdBias);
  m.def(kFlashBwdBiasExplain);
  m.def(kFlashVarlenBwdBiasExplain);
  m.def(kFlashBwdSlopes);
  m.def(kFlashVarlenBwdSlopes);
  m.def(kFlashBwdSlopesExplain);
  m.def(kFlashVarlenBwdSlopesExplain);
  m.def(kFlexFwd);
  m.def(kFlexFwdExplain);
  m.def(kFlexBwd);
  m.def(kFlexBwdExplain);
  m.def(kFlexBwdPlan);
  m.def(kFlexBwdCaptures);
  m.def(kFlexBwdCapturesExplain);
  m.def(kRope);
  m.def(kRopeInplace);
  m.def(kRopeExplain);
  m.def(kRopeTables);
  m.def(kRopeTablesExplain);
  m.def(kMergeState);
  m.def(kMergeStateInplace);
  m.def(kMergeStateExplain);
  m.def(kMergeSplits);
  m.def(kMergeSplitsExplain);
  m.def(kSoftmax);
  m.def(kSoftmaxInplace);
  m.def(kSoftmaxExplain);
  m.def(kApplyCausalMask);
  m.def(kApplyCausalMaskExplain);
  m.def(kApplyCausalMaskToCopy);
  m.def(kAppendKv);
  m.def(kAppendKvExplain);
  m.def(kCopyPages);
  m.def(kCopyPagesExplain);
}

// The shaders on CPU tensors, always.
STABLE_TORCH_LIBRARY(metal_attn_simulator, m) {
  m.def(kFlashFwd);
  m.def(kFlashVarlenFwd);
  m.def(kFlashDecode);
  m.def(kDecodeStep);
  m.def(kFlashBwd);
  m.def(kFlashVarlenBwd);
  m.def(kFlashBwdBias);
  m.def(kFlashVarlenBwdBias);
  m.def(kFlashBwdSlopes);
  m.def(kFlashVarlenBwdSlopes);
  m.def(kFlexFwd);
  m.def(kFlexBwd);
  m.def(kFlexBwdCaptures);
  m.def(kRope);
  m.def(kRopeInplace);
  m.def(kRopeTables);
  m.def(kMergeState);
  m.def(kMergeStateInplace);
  m.def(kMergeSplits);
  m.def(kSoftmax);
  m.def(kSoftmaxInplace);
  m.def(kApplyCausalMask);
  m.def(kApplyCausalMaskToCopy);
  m.def(kAppendKv);
  m.def(kCopyPages);
}

STABLE_TORCH_LIBRARY_IMPL(metal_attn, CompositeExplicitAutograd, m) {
  m.impl("flash_fwd", TORCH_BOX(&FlashFwd<flash_fwd_elsewhere>::dense_cached));
  m.impl("flash_varlen_fwd", TORCH_BOX(&FlashFwd<flash_fwd_elsewhere>::varlen_cached));
  m.impl("flash_fwd_explain", TORCH_BOX(&FlashFwd<metal_attn::flash_fwd_explain>::dense_cached));
  m.impl("flash_varlen_fwd_explain",
         TORCH_BOX(&FlashFwd<metal_attn::flash_fwd_explain>::varlen_cached));
  m.impl("flash_decode", TORCH_BOX(&FlashDecode<flash_decode_elsewhere>::call));
  m.impl("flash_decode_explain", TORCH_BOX(&FlashDecode<metal_attn::flash_decode_explain>::call));
  m.impl("decode_step", TORCH_BOX(&decode_step_op<decode_step_elsewhere>));
  m.impl("decode_step_explain", TORCH_BOX(&decode_step_op<metal_attn::decode_step_explain>));
  m.impl("flash_bwd", TORCH_BOX(&FlashBwd<flash_bwd_elsewhere>::dense));
  m.impl("flash_varlen_bwd", TORCH_BOX(&FlashBwd<flash_bwd_elsewhere>::varlen));
  m.impl("flash_bwd_explain", TORCH_BOX(&FlashBwd<metal_attn::flash_bwd_explain>::dense));
  m.impl("flash_varlen_bwd_explain", TORCH_BOX(&FlashBwd<metal_attn::flash_bwd_explain>::varlen));
  m.impl("flash_bwd_plan", TORCH_BOX(&FlashFwd<metal_attn::flash_bwd_plan>::dense));
  m.impl("flash_varlen_bwd_plan", TORCH_BOX(&FlashFwd<metal_attn::flash_bwd_plan>::varlen));
  m.impl("flash_bwd_bias", TORCH_BOX(&FlashBwdBias<flash_bwd_bias_elsewhere>::dense));
  m.impl("flash_varlen_bwd_bias", TORCH_BOX(&FlashBwdBias<flash_bwd_bias_elsewhere>::varlen));
  m.impl("flash_bwd_bias_explain",
         TORCH_BOX(&FlashBwdBias<metal_attn::flash_bwd_bias_explain>::dense));
  m.impl("flash_varlen_bwd_bias_explain",
         TORCH_BOX(&FlashBwdBias<metal_attn::flash_bwd_bias_explain>::varlen));
  m.impl("flash_bwd_slopes", TORCH_BOX(&FlashBwdBias<flash_bwd_slopes_elsewhere>::dense));
  m.impl("flash_varlen_bwd_slopes", TORCH_BOX(&FlashBwdBias<flash_bwd_slopes_elsewhere>::varlen));
  m.impl("flash_bwd_slopes_explain",
         TORCH_BOX(&FlashBwdBias<metal_attn::flash_bwd_slopes_explain>::dense));
  m.impl("flash_varlen_bwd_slopes_explain",
         TORCH_BOX(&FlashBwdBias<metal_attn::flash_bwd_slopes_explain>::varlen));
  m.impl("flex_fwd", TORCH_BOX(&FlexFwd<flash_fwd_elsewhere>::call));
  m.impl("flex_fwd_explain", TORCH_BOX(&FlexFwd<metal_attn::flex_fwd_explain>::call));
  m.impl("flex_bwd", TORCH_BOX(&FlexBwd<flash_bwd_elsewhere>::call));
  m.impl("flex_bwd_explain", TORCH_BOX(&FlexBwd<metal_attn::flash_bwd_explain>::call));
  m.impl("flex_bwd_plan", TORCH_BOX(&FlexBwdPlan<metal_attn::flex_bwd_plan>::call));
  m.impl("flex_bwd_captures", TORCH_BOX(&FlexBwdCaptures<flash_bwd_captures_elsewhere>::call));
  m.impl("flex_bwd_captures_explain",
         TORCH_BOX(&FlexBwdCaptures<metal_attn::flash_bwd_captures_explain>::call));
  m.impl("rope", TORCH_BOX(&rope_op<rope_elsewhere>));
  m.impl("rope_", TORCH_BOX(&rope_op<rope_inplace_elsewhere>));
  m.impl("rope_explain", TORCH_BOX((&rope_op<metal_attn::rope_explain, bool>)));
  m.impl("rope_tables", TORCH_BOX(&rope_tables_op<rope_tables_elsewhere>));
  m.impl("rope_tables_explain", TORCH_BOX(&rope_tables_op<metal_attn::rope_tables_explain>));
  m.impl("merge_state", TORCH_BOX(&merge_state_op<merge_state_elsewhere>));
  m.impl("merge_state_",
         TORCH_BOX((&merge_state_op<merge_state_inplace_elsewhere, std::optional<Tensor>>)));
  m.impl(
      "merge_state_explain",
      TORCH_BOX((&merge_state_op<metal_attn::merge_state_explain, bool, std::optional<Tensor>>)));
  m.impl("merge_splits", TORCH_BOX(&merge_splits_op<merge_splits_elsewhere>));
  m.impl("merge_splits_explain", TORCH_BOX(&merge_splits_op<metal_attn::merge_splits_explain>));
  m.impl("softmax", TORCH_BOX(&softmax_elsewhere<false>));
  m.impl("softmax_", TORCH_BOX(&softmax_elsewhere<true>));
  m.impl("softmax_explain", TORCH_BOX(&metal_attn::softmax_explain));
  m.impl("apply_causal_mask_", TORCH_BOX(&apply_causal_mask_elsewhere));
  m.impl("apply_causal_mask_explain", TORCH_BOX(&metal_attn::apply_causal_mask_explain));
  m.impl("append_kv", TORCH_BOX(&append_kv_op<append_kv_elsewhere>));
  m.impl("append_kv_explain", TORCH_BOX(&append_kv_op<metal_attn::append_kv_explain>));
  m.impl("copy_pages", TORCH_BOX(&copy_pages_elsewhere));
  m.impl("copy_pages_explain", TORCH_BOX(&metal_attn::copy_pages_explain));
}

STABLE_TORCH_LIBRARY_IMPL(metal_attn_simulator, CPU, m) {
  m.impl("flash_fwd", TORCH_BOX(&FlashFwd<flash_fwd<metal_attn::simulator_backend>>::dense_cached));
  m.impl("flash_varlen_fwd",
         TORCH_BOX(&FlashFwd<flash_fwd<metal_attn::simulator_backend>>::varlen_cached));
  m.impl("flash_decode",
         TORCH_BOX(&FlashDecode<flash_decode<metal_attn::simulator_backend>>::call));
  m.impl("decode_step", TORCH_BOX(&decode_step_op<decode_step<metal_attn::simulator_backend>>));
  m.impl("flash_bwd", TORCH_BOX(&FlashBwd<flash_bwd<metal_attn::simulator_backend>>::dense));
  m.impl("flash_varlen_bwd",
         TORCH_BOX(&FlashBwd<flash_bwd<metal_attn::simulator_backend>>::varlen));
  m.impl("flash_bwd_bias",
         TORCH_BOX(&FlashBwdBias<flash_bwd_bias<metal_attn::simulator_backend>>::dense));
  m.impl("flash_varlen_bwd_bias",
         TORCH_BOX(&FlashBwdBias<flash_bwd_bias<metal_attn::simulator_backend>>::varlen));
  m.impl("flash_bwd_slopes",
         TORCH_BOX(&FlashBwdBias<flash_bwd_slopes<metal_attn::simulator_backend>>::dense));
  m.impl("flash_varlen_bwd_slopes",
         TORCH_BOX(&FlashBwdBias<flash_bwd_slopes<metal_attn::simulator_backend>>::varlen));
  m.impl("flex_fwd", TORCH_BOX(&FlexFwd<flex_fwd<metal_attn::simulator_backend>>::call));
  m.impl("flex_bwd", TORCH_BOX(&FlexBwd<flash_bwd<metal_attn::simulator_backend>>::call));
  m.impl("flex_bwd_captures",
         TORCH_BOX(&FlexBwdCaptures<flash_bwd_captures<metal_attn::simulator_backend>>::call));
  m.impl("rope", TORCH_BOX(&rope_op<rope<metal_attn::simulator_backend>>));
  m.impl("rope_", TORCH_BOX(&rope_op<rope_inplace<metal_attn::simulator_backend>>));
  m.impl("rope_tables", TORCH_BOX(&rope_tables_op<rope_tables<metal_attn::simulator_backend>>));
  m.impl("merge_state", TORCH_BOX(&merge_state_op<merge_state<metal_attn::simulator_backend>>));
  m.impl("merge_state_",
         TORCH_BOX((&merge_state_op<merge_state_inplace<metal_attn::simulator_backend>,
                                    std::optional<Tensor>>)));
  m.impl("merge_splits", TORCH_BOX(&merge_splits_op<merge_splits<metal_attn::simulator_backend>>));
  m.impl("softmax", TORCH_BOX(&softmax<metal_attn::simulator_backend>));
  m.impl("softmax_", TORCH_BOX(&softmax_inplace<metal_attn::simulator_backend>));
  m.impl("apply_causal_mask_",
         TORCH_BOX(&apply_causal_mask_inplace<metal_attn::simulator_backend>));
  m.impl("append_kv", TORCH_BOX(&append_kv_op<append_kv<metal_attn::simulator_backend>>));
  m.impl("copy_pages", TORCH_BOX(&copy_pages<metal_attn::simulator_backend>));
}

#ifdef __APPLE__
STABLE_TORCH_LIBRARY_IMPL(metal_attn, MPS, m) {
  m.impl("flash_fwd", TORCH_BOX(&FlashFwd<flash_fwd<metal_attn::mps_backend>>::dense_cached));
  m.impl("flash_varlen_fwd",
         TORCH_BOX(&FlashFwd<flash_fwd<metal_attn::mps_backend>>::varlen_cached));
  m.impl("flash_decode", TORCH_BOX(&FlashDecode<flash_decode<metal_attn::mps_backend>>::call));
  m.impl("decode_step", TORCH_BOX(&decode_step_op<decode_step<metal_attn::mps_backend>>));
  m.impl("flash_bwd", TORCH_BOX(&FlashBwd<flash_bwd<metal_attn::mps_backend>>::dense));
  m.impl("flash_varlen_bwd", TORCH_BOX(&FlashBwd<flash_bwd<metal_attn::mps_backend>>::varlen));
  m.impl("flash_bwd_bias",
         TORCH_BOX(&FlashBwdBias<flash_bwd_bias<metal_attn::mps_backend>>::dense));
  m.impl("flash_varlen_bwd_bias",
         TORCH_BOX(&FlashBwdBias<flash_bwd_bias<metal_attn::mps_backend>>::varlen));
  m.impl("flash_bwd_slopes",
         TORCH_BOX(&FlashBwdBias<flash_bwd_slopes<metal_attn::mps_backend>>::dense));
  m.impl("flash_varlen_bwd_slopes",
         TORCH_BOX(&FlashBwdBias<flash_bwd_slopes<metal_attn::mps_backend>>::varlen));
  m.impl("flex_fwd", TORCH_BOX(&FlexFwd<flex_fwd<metal_attn::mps_backend>>::call));
  m.impl("flex_bwd", TORCH_BOX(&FlexBwd<flash_bwd<metal_attn::mps_backend>>::call));
  m.impl("flex_bwd_captures",
         TORCH_BOX(&FlexBwdCaptures<flash_bwd_captures<metal_attn::mps_backend>>::call));
  m.impl("rope", TORCH_BOX(&rope_op<rope<metal_attn::mps_backend>>));
  m.impl("rope_", TORCH_BOX(&rope_op<rope_inplace<metal_attn::mps_backend>>));
  m.impl("rope_tables", TORCH_BOX(&rope_tables_op<rope_tables<metal_attn::mps_backend>>));
  m.impl("merge_state", TORCH_BOX(&merge_state_op<merge_state<metal_attn::mps_backend>>));
  m.impl(
      "merge_state_",
      TORCH_BOX(
          (&merge_state_op<merge_state_inplace<metal_attn::mps_backend>, std::optional<Tensor>>)));
  m.impl("merge_splits", TORCH_BOX(&merge_splits_op<merge_splits<metal_attn::mps_backend>>));
  m.impl("softmax", TORCH_BOX(&softmax<metal_attn::mps_backend>));
  m.impl("softmax_", TORCH_BOX(&softmax_inplace<metal_attn::mps_backend>));
  m.impl("apply_causal_mask_", TORCH_BOX(&apply_causal_mask_inplace<metal_attn::mps_backend>));
  m.impl("append_kv", TORCH_BOX(&append_kv_op<append_kv<metal_attn::mps_backend>>));
  m.impl("copy_pages", TORCH_BOX(&copy_pages<metal_attn::mps_backend>));
}
#endif
