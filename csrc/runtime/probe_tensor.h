// Whether a GPU has the tensor operations that tensor tiles are made of.
#pragma once

#include <string>

#include "csrc/runtime/probe.h"

namespace metal_attn {

// What `probe_tensor` says of a language that has none. Nobody needs to be warned of that.
inline constexpr char kNoTensorLanguage[] =
    "torch compiles a version of Metal before 4.0, which has no tensor operations";

// Why tensor tiles cannot be used, in one line; "" if they can. Compares what
// shaders/probe_tensor.metal wrote with the tables in shaders/tensor_tile.h, slot by slot, and its
// products. float32: of float32 operands alone, or of those in half precision.
std::string probe_tensor(Backend& mps, const ProbeSettings& settings, bool float32);

}  // namespace metal_attn
