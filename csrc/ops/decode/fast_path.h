// Ops with few arguments, for calls without derivatives and without rare options. Each argument of
// a schema costs time. If such an op refuses a call, our functions call the op of metal_attn.
#pragma once

#include <torch/csrc/stable/library.h>

#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/check.h"
#include "csrc/ops/decode/decode_step.h"
#include "csrc/ops/decode/flash_decode.h"
#include "csrc/ops/decode/schema.h"

namespace metal_attn {

template <typename Library>
void define_fast_path(Library& m) {
  m.def("flash_fwd(Tensor q, Tensor k, Tensor v" FLASH_FIRST_SCHEMA ") -> " FLASH_FWD_RESULT);
  m.def("flash_decode(Tensor q, Tensor k, Tensor v" FLASH_FIRST_SCHEMA ") -> " FLASH_FWD_RESULT);
  m.def(
      "sdpa(Tensor q, Tensor k, Tensor v, float? softmax_scale=None, bool causal=False) -> Tensor");
  // The tensors of the following ops are (B, L, H, D), as in flash-attn.
  m.def("flash_attn(Tensor q, Tensor k, Tensor v" FLASH_FIRST_SCHEMA ") -> Tensor");
  m.def(
      "flash_attn_cached(Tensor q, Tensor k, Tensor v, Tensor? seqused_k=None, "
      "Tensor? block_table=None" FLASH_FIRST_SCHEMA ") -> Tensor");
  m.def(
      "flash_attn_step(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor cache_seqlens, Tensor? block_table=None" FLASH_FIRST_SCHEMA ROTARY_SCHEMA
      ") -> Tensor");
}

template <Backend& (*backend)()>
struct FastPath {
  static std::tuple<Tensor, Tensor> flash_fwd(const Tensor& q, const Tensor& k,
                                              const Tensor& v FLASH_FIRST_PARAMETERS) {
    return attention_fwd({q, k, v, std::nullopt, {FLASH_FIRST_VALUES}, {}}, backend());
  }

  static std::tuple<Tensor, Tensor> flash_decode(const Tensor& q, const Tensor& k,
                                                 const Tensor& v FLASH_FIRST_PARAMETERS) {
    return metal_attn::flash_decode({{q, k, v, std::nullopt, {FLASH_FIRST_VALUES}, {}}, 0},
                                    backend());
  }

  // Has torch's shapes and causal diagonal. Refuses shapes and dtypes that flash_fwd supports and
  // torch does not, and broadcasting.
  static Tensor sdpa(const Tensor& q, const Tensor& k, const Tensor& v,
                     std::optional<double> softmax_scale, bool causal) {
    check(q.dim() == 4 && same_sizes(k, v.sizes()) && k.dim() == 4 && q.size(1) == k.size(1) &&
              dtype_of(q) == dtype_of(k),
          "`q`, `k` and `v` are no plain operands of scaled_dot_product_attention");
    FlashFwdOptions options{softmax_scale, causal};
    options.q_offset = causal ? std::optional<int64_t>(0) : std::nullopt;
    return std::get<0>(attention_fwd({q, k, v, std::nullopt, options, {}}, backend()));
  }

  static Tensor flash_attn(const Tensor& q, const Tensor& k,
                           const Tensor& v FLASH_FIRST_PARAMETERS) {
    check_same_dtype("k", k, "q", q);  // flash_fwd would accept half precision with float32 q
    check_same_dtype("v", v, "q", q);
    return to_blhd(attention_fwd(
        {to_bhld(q), to_bhld(k), to_bhld(v), std::nullopt, {FLASH_FIRST_VALUES}, {}}, backend()));
  }

  static Tensor flash_attn_cached(const Tensor& q, const Tensor& k, const Tensor& v,
                                  OptionalTensor seqused_k,
                                  OptionalTensor block_table FLASH_FIRST_PARAMETERS) {
    FlashFwdOptions options{FLASH_FIRST_VALUES};
    options.seqused_k = seqused_k;
    CacheOptions cache{};
    cache.block_table = block_table;
    return to_blhd(metal_attn::flash_decode(
        {{to_bhld(q), to_bhld(k), to_bhld(v), std::nullopt, options, cache}, 0}, backend()));
  }

  static Tensor flash_attn_step(
      const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
      const Tensor& v_cache, const Tensor& cache_seqlens,
      OptionalTensor block_table FLASH_FIRST_PARAMETERS ROTARY_PARAMETERS) {
    return to_blhd(DecodeStep<run_step>::step(
        to_bhld(q), to_bhld(k), to_bhld(v), to_bhld(k_cache), to_bhld(v_cache), cache_seqlens,
        ROTARY_VALUES, {FLASH_FIRST_VALUES}, {.block_table = block_table}, 0));
  }

  template <typename Library>
  static void implement(Library& m) {
    m.impl("flash_fwd", TORCH_BOX(&FastPath::flash_fwd));
    m.impl("flash_decode", TORCH_BOX(&FastPath::flash_decode));
    m.impl("sdpa", TORCH_BOX(&FastPath::sdpa));
    m.impl("flash_attn", TORCH_BOX(&FastPath::flash_attn));
    m.impl("flash_attn_cached", TORCH_BOX(&FastPath::flash_attn_cached));
    m.impl("flash_attn_step", TORCH_BOX(&FastPath::flash_attn_step));
  }

 private:
  static std::tuple<Tensor, Tensor> run_step(const DecodeStepArguments& arguments) {
    return metal_attn::decode_step(arguments, backend());
  }

  // A (B, H, L, D) view of a (B, L, H, D) tensor.
  static Tensor to_bhld(const Tensor& rows) {
    check(rows.dim() == 4, "a tensor has ", Counted{rows.dim(), "dimension"}, "; it must have 4");
    return swapped(rows, 1, 2);
  }

  static Tensor to_blhd(const std::tuple<Tensor, Tensor>& result) {
    return swapped(std::get<0>(result), 1, 2);
  }
};

}  // namespace metal_attn
