// The schemas of flex attention's ops, and how the dispatcher's arguments become structs.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/ops/attention/flash_bwd.h"
#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/attention/types.h"
#include "csrc/runtime/torch_call.h"

// The forward runs without `slope`, the transposed lists and what begins with `share`: autograd
// hands them to the backward.
#define FLEX_OPTIONS                                                                        \
  "Tensor[] captures, float? softmax_scale=None, str score='', str slope='', str mask='', " \
  "Tensor? kv_num_blocks=None, Tensor? kv_indices=None, Tensor? full_kv_num_blocks=None, "  \
  "Tensor? full_kv_indices=None, Tensor? q_num_blocks=None, Tensor? q_indices=None, "       \
  "Tensor? full_q_num_blocks=None, Tensor? full_q_indices=None, Tensor? kv_order=None, "    \
  "Tensor? q_order=None, int q_block_size=0, int kv_block_size=0, str[]? shares=None, "     \
  "str[]? places=None, int[] share_captures=[], int[] share_owners=[])"
#define FLEX_FWD_ARGUMENTS "(Tensor q, Tensor k, Tensor v, *, " FLEX_OPTIONS
#define FLEX_BWD_ARGUMENTS                                                 \
  "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, " \
  "Tensor softmax_lse, *, " FLEX_OPTIONS
#define FLEX_BWD_CAPTURES_ARGUMENTS                                                \
  "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor softmax_lse, Tensor delta, " \
  "Tensor? normalisers, *, " FLEX_OPTIONS

namespace metal_attn {

using FlexTensor = const torch::stable::Tensor&;
using FlexOptionalTensor = const FlexOptions::OptionalTensor&;
using TextHandles = std::vector<StringHandle>;

// The text of an argument, which is freed. Torch's own conversion to a string (2.13) leaks a copy.
inline std::string taken(StringHandle handle) {
  const auto free_handle = [](StringHandle owned) { torch_delete_string(owned); };
  const std::unique_ptr<StringOpaque, decltype(free_handle)> owner(handle, free_handle);
  std::size_t length = 0;
  const char* data = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  return {data, length};
}

inline std::vector<std::string> taken(const std::optional<TextHandles>& handles) {
  std::vector<std::string> texts;
  for (StringHandle handle : handles.value_or(TextHandles{})) {
    texts.push_back(taken(handle));
  }
  return texts;
}

inline constexpr char kFlexFwd[] =
    "flex_fwd" FLEX_FWD_ARGUMENTS " -> (Tensor out, Tensor softmax_lse)";
inline constexpr char kFlexFwdExplain[] = "flex_fwd_explain" FLEX_FWD_ARGUMENTS " -> int[]";
inline constexpr char kFlexBwd[] =
    "flex_bwd" FLEX_BWD_ARGUMENTS
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor delta, Tensor normalisers)";
inline constexpr char kFlexBwdExplain[] = "flex_bwd_explain" FLEX_BWD_ARGUMENTS " -> int[]";
inline constexpr char kFlexBwdPlan[] = "flex_bwd_plan" FLEX_FWD_ARGUMENTS " -> int[]";
inline constexpr char kFlexBwdCaptures[] =
    "flex_bwd_captures" FLEX_BWD_CAPTURES_ARGUMENTS " -> Tensor[]";
inline constexpr char kFlexBwdCapturesExplain[] =
    "flex_bwd_captures_explain" FLEX_BWD_CAPTURES_ARGUMENTS " -> int[]";

// Those of attention, all off: score_mod and mask_mod say what flex attention does.
inline FlashFwdOptions flex_attention_options(std::optional<double> softmax_scale) {
  FlashFwdOptions options{};
  options.softmax_scale = softmax_scale;
  options.window_size_left = -1;
  options.window_size_right = -1;
  return options;
}

inline FlashFwdArguments flex_arguments(FlexTensor q, FlexTensor k, FlexTensor v,
                                        std::optional<double> softmax_scale,
                                        const FlexOptions& options) {
  return {q, k, v, std::nullopt, flex_attention_options(softmax_scale), {}, options};
}

// What an op that walks over the keys needs: no transposed lists, and no slope of the scores.
inline FlexOptions over_keys(FlexOptions options) {
  options.slope.clear();
  options.q_num_blocks.reset();
  options.q_indices.reset();
  options.full_q_num_blocks.reset();
  options.full_q_indices.reset();
  options.q_order.reset();
  return options;
}

inline FlexOptions without_shares(FlexOptions options) {
  options.shares.clear();
  options.places.clear();
  options.share_captures.clear();
  options.share_owners.clear();
  return options;
}

inline FlexOptions without_order(FlexOptions options) {
  options.kv_order.reset();
  return options;
}

// `op` of its own arguments, the softmax scale and FLEX_OPTIONS, which the dispatcher gives one by
// one.
template <auto op, class... Own>
struct FlexOp {
  using Tensor = torch::stable::Tensor;
  using OptionalTensor = FlexOptions::OptionalTensor;
  static auto call(Own... own, std::vector<Tensor> captures, std::optional<double> softmax_scale,
                   StringHandle score, StringHandle slope, StringHandle mask,
                   OptionalTensor kv_num_blocks, OptionalTensor kv_indices,
                   OptionalTensor full_kv_num_blocks, OptionalTensor full_kv_indices,
                   OptionalTensor q_num_blocks, OptionalTensor q_indices,
                   OptionalTensor full_q_num_blocks, OptionalTensor full_q_indices,
                   OptionalTensor kv_order, OptionalTensor q_order, int64_t q_block_size,
                   int64_t kv_block_size, std::optional<TextHandles> shares,
                   std::optional<TextHandles> places, std::vector<int64_t> share_captures,
                   std::vector<int64_t> share_owners) {
    return op(own..., softmax_scale,
              FlexOptions{taken(score),  taken(slope),  taken(mask),        captures,
                          kv_num_blocks, kv_indices,    full_kv_num_blocks, full_kv_indices,
                          q_num_blocks,  q_indices,     full_q_num_blocks,  full_q_indices,
                          kv_order,      q_order,       q_block_size,       kv_block_size,
                          taken(shares), taken(places), share_captures,     share_owners});
  }
};

template <auto run>
auto run_flex_fwd(FlexTensor q, FlexTensor k, FlexTensor v, std::optional<double> softmax_scale,
                  const FlexOptions& options) {
  return run(flex_arguments(q, k, v, softmax_scale, over_keys(without_shares(options))));
}

// What a backward will be given, all of it.
template <auto run>
auto run_flex_bwd_plan(FlexTensor q, FlexTensor k, FlexTensor v,
                       std::optional<double> softmax_scale, const FlexOptions& options) {
  return run(flex_arguments(q, k, v, softmax_scale, options));
}

template <auto run>
auto run_flex_bwd(FlexTensor dout, FlexOptionalTensor dlse, FlexTensor q, FlexTensor k,
                  FlexTensor v, FlexTensor out, FlexTensor lse, std::optional<double> softmax_scale,
                  const FlexOptions& options) {
  return run({dout, dlse, out, lse, true,
              flex_arguments(q, k, v, softmax_scale, without_shares(options))});
}

template <auto run>
auto run_flex_bwd_captures(FlexTensor dout, FlexTensor q, FlexTensor k, FlexTensor v,
                           FlexTensor lse, FlexTensor delta, FlexOptionalTensor normalisers,
                           std::optional<double> softmax_scale, const FlexOptions& options) {
  const FlexOptions walked = over_keys(without_order(options));
  return run({dout, lse, delta, normalisers, flex_arguments(q, k, v, softmax_scale, walked)});
}

template <auto run>
using FlexFwd = FlexOp<run_flex_fwd<run>, FlexTensor, FlexTensor, FlexTensor>;
template <auto run>
using FlexBwdPlan = FlexOp<run_flex_bwd_plan<run>, FlexTensor, FlexTensor, FlexTensor>;
template <auto run>
using FlexBwd = FlexOp<run_flex_bwd<run>, FlexTensor, FlexOptionalTensor, FlexTensor, FlexTensor,
                       FlexTensor, FlexTensor, FlexTensor>;
template <auto run>
using FlexBwdCaptures = FlexOp<run_flex_bwd_captures<run>, FlexTensor, FlexTensor, FlexTensor,
                               FlexTensor, FlexTensor, FlexTensor, FlexOptionalTensor>;

}  // namespace metal_attn
