// copy_pages.
#pragma once

#include "common.h"

enum CopyPagesBuffer {
  COPY_PAGES_CACHE = 0,
  COPY_PAGES_SRC = 1,
  COPY_PAGES_DST = 2,
  COPY_PAGES_PARAMS = 3,
};

// Threads of a threadgroup of copy_pages, and words that each copies.
#define COPY_PAGES_THREADS 256
#define COPY_PAGES_WORDS 4

// Strides and sizes count words: what is copied at a time.
struct CopyPagesParams {
  RowDims words;  // of a page
  int64_t page_stride;
  int64_t src_stride;
  int64_t dst_stride;
  int64_t pages;
  uint32_t page_words;
};
