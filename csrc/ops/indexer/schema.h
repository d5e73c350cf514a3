// The schema of the indexer's op, and the conversion of the dispatcher's arguments to a struct.
#pragma once

#include "csrc/ops/common/arguments.h"
#include "csrc/ops/indexer/index_scores.h"

#define INDEX_SCORES_ARGUMENTS                                                             \
  "(Tensor q, Tensor k, Tensor weights, *, float? softmax_scale=None, bool causal=False, " \
  "SymInt? q_offset=None"

namespace metal_attn {

template <auto run>
using IndexScores = InStruct<run, IndexScoresArguments, TensorArgument, TensorArgument,
                             TensorArgument, std::optional<double>, bool, std::optional<int64_t>>;

}  // namespace metal_attn
