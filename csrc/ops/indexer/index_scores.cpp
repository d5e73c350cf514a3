#include "csrc/ops/indexer/index_scores.h"

#include <cmath>

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/check.h"
#include "csrc/ops/common/recorder.h"
#include "csrc/problem/strides.h"
#include "shaders/params/index_scores.h"

namespace metal_attn {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kMostSimdgroups = 4;
// The most keys of a tile, and the most bytes of their rows. Larger tiles would spill on M1.
constexpr int kMostBlockKeys = 32;
constexpr int kBlockBytes = 8192;

struct IndexScoresCall {
  Element element;
  Element weight_element;
  int head_dim;
  int32_t batch;
  int32_t heads;
  int32_t q_length;
  int32_t kv_length;
  float scale;

  int simdgroups() const { return q_length == 1 ? 1 : q_length == 2 ? 2 : kMostSimdgroups; }
  int columns() const { return (head_dim + 7) / 8 * 8; }
  int block_keys() const {
    int keys = kMostBlockKeys;
    while (keys > 8 && keys * columns() * element_bytes(element) > kBlockBytes) { keys /= 2; }
    return keys;
  }
  int threadgroup_bytes() const {
    return block_keys() * padded(columns()) * element_bytes(element);
  }
  bool launches() const { return batch > 0 && q_length > 0 && kv_length > 0; }
};

IndexScoresCall check_index_scores(const IndexScoresArguments& a) {
  IndexScoresCall call{};
  check_device("q", a.q);
  check_same_device("k", a.k, "q", a.q);
  check_same_device("weights", a.weights, "q", a.q);
  call.element = check_element("q", a.q);
  check_same_dtype("k", a.k, "q", a.q);
  call.weight_element = check_element("weights", a.weights);
  check_rank("q", a.q, 4, "(batch, heads, q_length, head_dim)");
  check_rank("k", a.k, 3, "(batch, kv_length, head_dim)");
  call.batch = check_length("q", a.q, 0, "batch");
  call.heads = check_length("q", a.q, 1, "number of heads");
  call.q_length = check_length("q", a.q, 2, "length");
  call.kv_length = check_length("k", a.k, 1, "length");
  call.head_dim = check_head_dim("q", a.q.size(3), kMaxHeadDim);
  check_shape("k", a.k, {{a.q.size(0), a.k.size(1), a.q.size(3)}});
  check_shape("weights", a.weights, {{a.q.size(0), a.q.size(1), a.q.size(2)}});
  for (const auto& [name, tensor] : {std::pair{"q", &a.q}, {"k", &a.k}}) {
    check_rows(name, *tensor);
  }
  check_storage("weights", a.weights);
  const double scale = a.softmax_scale.value_or(1.0 / std::sqrt(double(call.head_dim)));
  call.scale = static_cast<float>(scale);
  check(std::isfinite(call.scale), "`softmax_scale` is ", scale, "; it must be finite in float32");
  check_offset("q_offset", a.q_offset.value_or(0));
  check(!a.q_offset || a.causal, "`q_offset` is ", a.q_offset.value_or(0),
        " and `causal` is False; `q_offset` matters only with causal=True: leave it at None");
  const double bytes = 4.0 * call.batch * call.q_length * call.kv_length;
  check(bytes < static_cast<double>(std::numeric_limits<int64_t>::max()), "`q` has shape ",
        shape_text(a.q), " and `k` ", shape_text(a.k), "; the scores must be under 2^63 bytes");
  return call;
}

Launch index_scores_launch(const IndexScoresArguments& a, const IndexScoresCall& call,
                           const Tensor& out) {
  IndexScoresParams params{};
  // A row is a head of a query.
  params.q_strides = {a.q.stride(0), a.q.stride(2), a.q.stride(1)};
  params.k_strides = {a.k.stride(0), 0, a.k.stride(1)};
  params.weight_strides = {a.weights.stride(0), a.weights.stride(2), a.weights.stride(1)};
  params.q_offset = a.q_offset.value_or(int64_t{call.kv_length} - call.q_length);
  params.heads = call.heads;
  params.q_length = call.q_length;
  params.kv_length = call.kv_length;
  params.softmax_scale = call.scale;
  const bool wide = call.head_dim % 8 == 0 && rows_aligned_16(a.k);
  const bool pairs = call.head_dim % 2 == 0 && rows_aligned(a.q, 2 * element_bytes(call.element));
  Defines defines{{"ELEMENT", element_name(call.element)},
                  {"WEIGHT_ELEMENT", element_name(call.weight_element)},
                  {"HEAD_DIM", call.head_dim},
                  {"BLOCK_K", call.block_keys()},
                  {"SIMDGROUPS", call.simdgroups()},
                  {"WIDE_LOADS", wide},
                  {"ROW_PAIRS", pairs}};
  define_if(a.causal, defines, "CAUSAL");
  define_if(has_long_offsets(a.q) || has_long_offsets(a.k) || has_long_offsets(a.weights), defines,
            "LONG_OFFSETS");
  Launch launch("index_scores", defines);
  // Without heads, q and weights have no memory, and the kernel does not read them.
  const bool no_heads = call.heads == 0;
  launch.buffers = {{INDEX_SCORES_Q, no_heads ? a.k : a.q, false},
                    {INDEX_SCORES_K, a.k, false},
                    {INDEX_SCORES_WEIGHTS, no_heads ? a.k : a.weights, false},
                    {INDEX_SCORES_OUT, out, true}};
  launch.set_params(INDEX_SCORES_PARAMS, params);
  launch.threadgroups = extent(divide_up(call.kv_length, call.block_keys()),
                               divide_up(call.q_length, call.simdgroups()), call.batch);
  launch.threads = extent(kSimdgroupThreads * call.simdgroups());
  launch.work.threadgroup =
      double(call.simdgroups()) * call.block_keys() * call.heads * (call.head_dim + 1);
  return launch;
}

}  // namespace

Tensor index_scores(const IndexScoresArguments& a, Backend& backend) {
  const IndexScoresCall call = check_index_scores(a);
  const Tensor out =
      new_empty(a.q, Dims{call.batch, call.q_length, call.kv_length}, ScalarType::Float);
  if (call.launches()) {
    note(backend, [&call] {
      const int keys = call.block_keys();
      return JsonObject()
          .add("threadgroup_bytes", call.threadgroup_bytes())
          .add("reason", "a SIMD group for each query, with its heads as rows, and " +
                             std::to_string(keys) + " keys");
    });
    backend.run(index_scores_launch(a, call, out));
  }
  return out;
}

}  // namespace metal_attn
