// metal_attn::copy_pages: pages of a cache copied onto others of it, for copy-on-write.
#pragma once

#include "csrc/runtime/backend.h"

namespace metal_attn {

// cache: (pages, ...), of any dtype, rank and strides; no two elements share memory. src and dst:
// (N) int32 or int64 alike. Page dst[i] becomes a copy of page src[i], bit for bit. Throws
// std::invalid_argument for others, and where the host can read them for values outside the pages,
// a dst given twice, or one that is some src: then the result would depend on the order. On mps
// what lies outside is skipped.
void copy_pages(const Tensor& cache, const Tensor& src, const Tensor& dst, Backend& backend);

}  // namespace metal_attn
