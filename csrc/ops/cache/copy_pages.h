// metal_attn::copy_pages: copies pages within a cache, for copy-on-write.
#pragma once

#include "csrc/runtime/backend.h"

namespace metal_attn {

// Copies page src[i] to page dst[i], bit for bit. cache: (pages, ...), any dtype, rank and strides,
// but no two elements may share memory. src and dst: (N), both int32 or both int64. On the CPU,
// refuses values outside of the cache, duplicates in dst, and pages that are in src and in dst: the
// result would depend on the order. On mps, ignores values outside of the cache.
void copy_pages(const Tensor& cache, const Tensor& src, const Tensor& dst, Backend& backend);

}  // namespace metal_attn
