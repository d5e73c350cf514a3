#include "csrc/ops/cache/copy_pages.h"

#include <array>

#include "csrc/ops/cache/check_copy_pages.h"
#include "csrc/ops/cache/choose.h"
#include "csrc/ops/cache/fill.h"
#include "csrc/ops/common/json.h"
#include "shaders/params.h"

namespace metal_attn {

using torch::stable::Tensor;

void copy_pages(const Tensor& cache, const Tensor& src, const Tensor& dst, Backend& backend) {
  check_copy_pages(cache, src, dst);
  const CopyPagesSpecialisation s = choose_copy_pages(cache, src);
  if (s.launches()) {
    backend.run(copy_pages_launch(cache, src, dst, s));
  }
}

PackedText copy_pages_explain(const Tensor& cache, const Tensor& src, const Tensor& dst) {
  check_copy_pages(cache, src, dst);
  const CopyPagesSpecialisation s = choose_copy_pages(cache, src);
  return JsonObject()
      .add("kernel", "copy_pages")
      .add("defines", copy_pages_defines(s))
      .add("grid", s.launches() ? copy_pages_threadgroups(s) : std::array<uint32_t, 3>{})
      .add("threads", std::array<uint32_t, 3>{COPY_PAGES_THREADS, 1, 1})
      .add("threadgroup_bytes", int64_t{0})
      .add("backend", cache.is_cpu() ? "simulator" : "mps")
      .add("reason", s.launches() ? std::to_string(s.word_bytes) + " bytes at a time"
                                  : "nothing to copy: no kernel is launched")
      .packed();
}

}  // namespace metal_attn
