#include "csrc/ops/attention/check_bwd.h"

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/check.h"

namespace metal_attn {

using torch::stable::Tensor;

void check_differentiable(const FlashFwdArguments& f) {
  check_same_dtype("k", f.k, "q", f.q);
  check_same_dtype("v", f.v, "q", f.q);
}

void check_like_out(ArgumentName name, const Tensor& tensor, const FlashFwdArguments& f) {
  Dims sizes = sizes_of(f.q);
  sizes.back() = f.v.size(f.v.dim() - 1);
  check_device(name, tensor);
  check_same_device(name, tensor, "q", f.q);
  check_same_dtype(name, tensor, "q", f.q);
  check_shape(name, tensor, {sizes});
  check_last_stride(name, tensor);
  check_storage(name, tensor);
}

void check_statistics(ArgumentName name, const Tensor& tensor, const FlashFwdArguments& f) {
  const Tensor& q = f.q;
  const Dims sizes = f.packing ? Dims{q.size(1), q.size(0)} : Dims{q.size(0), q.size(1), q.size(2)};
  check_statistics(name, tensor, "q", q, sizes);
}

void check_contiguous(ArgumentName name, const Tensor& tensor) {
  check(tensor.is_contiguous(), name, " has strides ", stride_text(tensor),
        "; it must be contiguous: pass what the op returned, or call ", name, ".contiguous()");
}

}  // namespace metal_attn
