// Parameters of copy_pages.
#pragma once

#include "common.h"

enum CopyPagesBuffer {
  COPY_PAGES_CACHE = 0,
  COPY_PAGES_SRC = 1,
  COPY_PAGES_DST = 2,
  COPY_PAGES_PARAMS = 3,
};

// The number of threads in a threadgroup, and the number of words that a thread copies.
#define COPY_PAGES_THREADS 256
#define COPY_PAGES_WORDS 4

// Strides and sizes are in words.
struct CopyPagesParams {
  RowDims words;  // of a page
  int64_t page_stride;
  int64_t src_stride;
  int64_t dst_stride;
  int64_t pages;
  uint32_t page_words;
};
