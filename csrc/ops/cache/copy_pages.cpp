#include "csrc/ops/cache/copy_pages.h"

#include <array>

#include "csrc/ops/cache/check_copy_pages.h"
#include "csrc/ops/cache/choose.h"
#include "csrc/ops/cache/fill.h"
#include "csrc/ops/common/recorder.h"
#include "shaders/params.h"

namespace metal_attn {

using torch::stable::Tensor;

void copy_pages(const Tensor& cache, const Tensor& src, const Tensor& dst, Backend& backend) {
  check_copy_pages(cache, src, dst);
  const CopyPagesSpecialisation s = choose_copy_pages(cache, src);
  if (s.launches()) {
    note(backend, [&s] {
      return JsonObject().add("reason", std::to_string(s.word_bytes) + " bytes at a time");
    });
    backend.run(copy_pages_launch(cache, src, dst, s));
  }
}

}  // namespace metal_attn
