// The ops of few arguments, which our functions call. Their CPU kernels are in
// torch_metal_attn/ops/plain.py.
#include <torch/csrc/stable/library.h>

#include "csrc/ops/decode/plain.h"

STABLE_TORCH_LIBRARY(metal_attn_plain, m) { metal_attn::define_plain(m); }

#ifdef __APPLE__
STABLE_TORCH_LIBRARY_IMPL(metal_attn_plain, MPS, m) {
  metal_attn::Plain<metal_attn::mps_backend>::implement(m);
}
#endif
