// Copies pages of a cache to other pages, so that a forked sequence writes to pages of its own.
#include "params/pages.h"
#include "row_dims.h"

#define UNROLL _Pragma("clang loop unroll(full)")

// The host defines INDEX (int or long), and WORD, the widest unsigned type that the cache allows.
[[kernel, max_total_threads_per_threadgroup(COPY_PAGES_THREADS)]] void copy_pages(
    device WORD* cache [[buffer(COPY_PAGES_CACHE)]],
    const device INDEX* src [[buffer(COPY_PAGES_SRC)]],
    const device INDEX* dst [[buffer(COPY_PAGES_DST)]],
    constant CopyPagesParams& params [[buffer(COPY_PAGES_PARAMS)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const int64_t copy = position.y;
  const int64_t from = src[copy * params.src_stride];
  const int64_t to = dst[copy * params.dst_stride];
  if (from < 0 || from >= params.pages || to < 0 || to >= params.pages) { return; }
  const device WORD* from_page = cache + from * params.page_stride;
  device WORD* to_page = cache + to * params.page_stride;
  const uint first = position.x * (COPY_PAGES_THREADS * COPY_PAGES_WORDS) + thread_index;
  UNROLL
  for (short i = 0; i < COPY_PAGES_WORDS; i++) {
    const uint word = first + i * COPY_PAGES_THREADS;
    if (word < params.page_words) {
      const int64_t offset = row_offset(params.words, word);
      to_page[offset] = from_page[offset];
    }
  }
}
