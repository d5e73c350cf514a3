// metal_tensor: views of memory as matrices.
#pragma once
#include <__msl_simd.h>
#include <__msl_traits.h>

namespace metal {

constexpr constant size_t dynamic_extent = (size_t)-1;

template <class Index, size_t... Sizes>
struct extents {
  typedef Index index_type;
};

}  // namespace metal
