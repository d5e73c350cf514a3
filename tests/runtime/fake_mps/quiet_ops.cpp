// For bench/bench_launch.py: the package's ops on CPU tensors, run by the backend of mps.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "csrc/ops/attention/schema.h"
#include "csrc/ops/decode/fast_path.h"
#include "csrc/ops/decode/schema.h"
#include "csrc/runtime/backend.h"

namespace {

using metal_attn::FlashFwd;
using metal_attn::FlashFwdArguments;
using torch::stable::Tensor;
using Result = std::tuple<Tensor, Tensor>;

Result flash_fwd(const FlashFwdArguments& a) {
  return metal_attn::attention_fwd(a, metal_attn::mps_backend());
}

Result flash_decode(const metal_attn::FlashDecodeArguments& a) {
  return metal_attn::flash_decode(a, metal_attn::mps_backend());
}

Result decode_step(const metal_attn::DecodeStepArguments& a) {
  return metal_attn::decode_step(a, metal_attn::mps_backend());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(metal_attn, CPU, m) {
  m.impl("flash_fwd", TORCH_BOX(&FlashFwd<flash_fwd>::call));
  m.impl("flash_decode", TORCH_BOX(&metal_attn::FlashDecode<flash_decode>::call));
  m.impl("decode_step", TORCH_BOX(&metal_attn::DecodeStep<decode_step>::call));
}

STABLE_TORCH_LIBRARY_IMPL(metal_attn_fast, CPU, m) {
  metal_attn::FastPath<metal_attn::mps_backend>::implement(m);
}
