#include "csrc/ops/softmax/fill.h"

#include "shaders/params.h"

namespace metal_attn {

using torch::stable::Tensor;

namespace {

// The dimensions of `tensor` but its last. Neighbours are joined where one stride serves both, but
// the innermost one not if the kernel asks for its positions.
RowDims row_dims(const Tensor& tensor, bool keep_innermost) {
  RowDims dims{};
  for (int64_t dim = tensor.dim() - 2; dim >= 0; --dim) {
    const int64_t size = tensor.size(dim);
    const int64_t stride = tensor.stride(dim);
    if (size == 1) {
      continue;
    }
    const int inner = dims.count - 1;
    const bool may_join = inner > 0 || (inner == 0 && !keep_innermost);
    if (may_join && stride == dims.strides[inner] * dims.sizes[inner]) {
      dims.sizes[inner] *= static_cast<uint32_t>(size);
    } else {
      dims.sizes[dims.count] = static_cast<uint32_t>(size);
      dims.strides[dims.count] = stride;
      ++dims.count;
    }
  }
  return dims;
}

Launch launch_of(const char* kernel, const SoftmaxRows& rows, const SoftmaxSpecialisation& s) {
  Launch launch;
  launch.program.family = "softmax";
  launch.kernel = kernel;
  launch.program.defines = s.defines();
  launch.threadgroups = softmax_threadgroups(rows, s);
  launch.threads = {s.threads(), 1, 1};
  return launch;
}

}  // namespace

Launch softmax_launch(const SoftmaxCall& call, const SoftmaxSpecialisation& s, const Tensor& out) {
  SoftmaxParams params{};
  params.x_rows = row_dims(call.x, false);
  params.out_rows = row_dims(out, false);
  params.x_stride = call.x.stride(call.x.dim() - 1);
  params.out_stride = out.stride(out.dim() - 1);
  params.rows = static_cast<uint32_t>(call.rows.count);
  params.length = static_cast<uint32_t>(call.rows.length);

  Launch launch = launch_of("softmax", call.rows, s);
  launch.buffers = {{SOFTMAX_X, call.x, false}, {SOFTMAX_OUT, out, true}};
  launch.params_slot = SOFTMAX_PARAMS;
  launch.params.set(params);
  return launch;
}

Launch causal_mask_launch(const SoftmaxRows& rows, const SoftmaxSpecialisation& s,
                          const Tensor& scores, int64_t q_offset) {
  CausalMaskParams params{};
  params.score_rows = row_dims(scores, scores.size(scores.dim() - 2) > 1);
  params.key_stride = scores.stride(scores.dim() - 1);
  params.q_offset = q_offset;
  params.rows = static_cast<uint32_t>(rows.count);
  params.q_length = static_cast<uint32_t>(scores.size(scores.dim() - 2));
  params.kv_length = static_cast<uint32_t>(rows.length);

  Launch launch = launch_of("apply_causal_mask", rows, s);
  launch.buffers = {{CAUSAL_MASK_SCORES, scores, true}};
  launch.params_slot = CAUSAL_MASK_PARAMS;
  launch.params.set(params);
  return launch;
}

}  // namespace metal_attn
