// The schemas of flex attention's ops, and the conversion of the dispatcher's arguments to structs.
#pragma once

#include <cstddef>
#include <memory>

#include "csrc/ops/common/arguments.h"
#include "csrc/problem/attention.h"
#include "csrc/runtime/torch_call.h"

// The forward ignores `slope`, the transposed lists and the shares. They are arguments because
// autograd passes them to the backward.
#define FLEX_OPTION_SCHEMA(TYPE, NAME, SCHEMA, DEFAULT) ", " SCHEMA " " #NAME "=" DEFAULT
#define FLEX_SCHEMA "Tensor[] captures, float? softmax_scale=None" FLEX_OPTIONS(FLEX_OPTION_SCHEMA)
#define FLEX_FWD_ARGUMENTS "(Tensor q, Tensor k, Tensor v, *, " FLEX_SCHEMA
#define FLEX_BWD_ARGUMENTS                                                 \
  "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, " \
  "Tensor softmax_lse, *, " FLEX_SCHEMA
#define FLEX_BWD_CAPTURES_ARGUMENTS                                                \
  "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor softmax_lse, Tensor delta, " \
  "Tensor? normalisers, *, " FLEX_SCHEMA

namespace metal_attn {

using TextHandles = std::vector<StringHandle>;

// Maps a type of FLEX_OPTIONS to the type of the dispatcher's argument.
template <class Type>
struct DispatcherType {
  using type = Type;
};
template <>
struct DispatcherType<Text> {
  using type = StringHandle;
};
template <>
struct DispatcherType<Texts> {
  using type = std::optional<TextHandles>;
};

// Copies the text and frees the handle. torch's conversion to a string leaks a copy (2.13).
inline std::string to_owned(StringHandle handle) {
  const auto free_handle = [](StringHandle owned) { torch_delete_string(owned); };
  const std::unique_ptr<StringOpaque, decltype(free_handle)> owner(handle, free_handle);
  std::size_t length = 0;
  const char* data = nullptr;
  TORCH_CALL(torch_string_length(handle, &length));
  TORCH_CALL(torch_string_c_str(handle, &data));
  return {data, length};
}

template <class Type>
Type to_owned(Type value) {
  return value;
}

inline std::vector<std::string> to_owned(const std::optional<TextHandles>& handles) {
  std::vector<std::string> texts;
  for (StringHandle handle : handles.value_or(TextHandles{})) { texts.push_back(to_owned(handle)); }
  return texts;
}

inline FlashFwdArguments flex_arguments(TensorArgument q, TensorArgument k, TensorArgument v,
                                        std::optional<double> softmax_scale,
                                        const FlexOptions& options) {
  return {q, k, v, std::nullopt, {.softmax_scale = softmax_scale}, {}, options};
}

// The options without the transposed lists and the slope of scores.
inline FlexOptions over_keys(FlexOptions o) {
  o.slope.clear();
  for (OptionalTensor* transposed :
       {&o.q_num_blocks, &o.q_indices, &o.full_q_num_blocks, &o.full_q_indices, &o.q_order}) {
    transposed->reset();
  }
  return o;
}

inline FlexOptions without_shares(FlexOptions o) {
  o.shares = o.places = {};
  o.share_captures = o.share_owners = {};
  return o;
}

#define FLEX_PARAMETER(TYPE, NAME, SCHEMA, DEFAULT) \
  , typename DispatcherType<metal_attn::TYPE>::type NAME
#define FLEX_VALUE(TYPE, NAME, SCHEMA, DEFAULT) to_owned(NAME),

// Calls `op` with its operands, the softmax scale and FLEX_OPTIONS as a struct.
template <auto op, class... Operands>
struct FlexOp {
  static auto call(Operands... operands, std::vector<Tensor> captures,
                   OptionalNumber softmax_scale FLEX_OPTIONS(FLEX_PARAMETER)) {
    return op(operands..., softmax_scale, FlexOptions{captures, FLEX_OPTIONS(FLEX_VALUE)});
  }
};

#undef FLEX_PARAMETER
#undef FLEX_VALUE

template <auto run>
auto run_flex_fwd(TensorArgument q, TensorArgument k, TensorArgument v,
                  std::optional<double> softmax_scale, const FlexOptions& options) {
  return run(flex_arguments(q, k, v, softmax_scale, over_keys(without_shares(options))));
}

template <auto run>
auto run_flex_bwd(TensorArgument dout, const OptionalTensor& dlse, TensorArgument q,
                  TensorArgument k, TensorArgument v, TensorArgument out, TensorArgument lse,
                  std::optional<double> softmax_scale, const FlexOptions& options) {
  return run(FlashBwdArguments{dout, dlse, out, lse, true,
                               flex_arguments(q, k, v, softmax_scale, without_shares(options))});
}

template <auto run>
auto run_flex_bwd_captures(TensorArgument dout, TensorArgument q, TensorArgument k,
                           TensorArgument v, TensorArgument lse, TensorArgument delta,
                           const OptionalTensor& normalisers, std::optional<double> softmax_scale,
                           const FlexOptions& options) {
  FlexOptions walked = over_keys(options);
  walked.kv_order.reset();
  return run(FlashBwdBiasArguments{dout, lse, delta, normalisers,
                                   flex_arguments(q, k, v, softmax_scale, walked)});
}

template <auto run>
using FlexFwd = FlexOp<run_flex_fwd<run>, TensorArgument, TensorArgument, TensorArgument>;
template <auto run>
using FlexBwd = FlexOp<run_flex_bwd<run>, TensorArgument, const OptionalTensor&, TensorArgument,
                       TensorArgument, TensorArgument, TensorArgument, TensorArgument>;
template <auto run>
using FlexBwdCaptures =
    FlexOp<run_flex_bwd_captures<run>, TensorArgument, TensorArgument, TensorArgument,
           TensorArgument, TensorArgument, TensorArgument, const OptionalTensor&>;

}  // namespace metal_attn
