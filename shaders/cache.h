// Rows of K or V that lie in pages, or are quantised, or both.
#pragma once

#include "operand.h"
#include "paged.h"
#include "quantised.h"

#if PAGE_SIZE || KV_FORMAT

// Rows at a fixed stride in pages at a fixed stride. A cache without pages is all in page 0.
template <typename T>
struct PagedRows {
  const device T* first;
  int64_t page_stride;
  int64_t row_stride;

  METAL_FUNC const device T* row(int page, int page_row) const thread {
    return first + page * page_stride + page_row * row_stride;
  }
};

// Rows COLUMNS long; with ROTATED, they are rotated as they are read. A row of a missing
// page reads as MISSING bits: NaN keys reach every query that sees them, so values can be 0.
template <int COLUMNS, bool ROTATED, uint MISSING>
struct CacheOperand {
  PagedRows<KV_ELEMENT> data;
#if PAGE_SIZE
  PageTable pages;
#endif
#if KV_BLOCK_SCALES
  PagedRows<half> scales;
#elif KV_FORMAT
  float scale;
#endif
#if K_ROTARY
  RotaryTables rotary;
#endif

  struct Place {
    const device KV_ELEMENT* row;
#if KV_BLOCK_SCALES
    const device half* scales;
#endif
    int position;
    bool exists;
  };

  METAL_FUNC Place find(int row) const thread {
#if PAGE_SIZE
    const int page = pages.page_of(row);
    const int page_row = uint(row) % PAGE_SIZE;
#else
    const int page = 0;
    const int page_row = row;
#endif
    Place place;
    place.row = data.row(page, page_row);
#if KV_BLOCK_SCALES
    place.scales = scales.row(page, page_row);
#endif
    place.position = row;
    place.exists = page >= 0;
    return place;
  }

#if KV_BLOCK_SCALES
  // For kernels that multiply by the scale of a span themselves: 8 codes from `column` on, and the
  // scale of their span. Those of a missing row are 0, and MISSING.
  METAL_FUNC uint2 codes(thread const Place& place, int column) const thread {
    return place.exists ? load_codes<COLUMNS, FRAGMENT>(place.row, column) : uint2(0);
  }

  METAL_FUNC float span_scale(thread const Place& place, int span) const thread {
    return place.exists ? float(place.scales[span]) : as_type<float>(MISSING);
  }
#endif

  METAL_FUNC uint4 chunk(thread const Place& place, int column) const thread {
    if (!place.exists) {
      return uint4(MISSING);
    }
#if KV_BLOCK_SCALES
    const float scale = float(place.scales[column / SCALE_COLUMNS]);
#endif
#if KV_FORMAT
    return dequantised_chunk<ELEMENT, COLUMNS>(place.row, column, scale);
#else
#if K_ROTARY
    if (ROTATED) {
      return rotary.rotated_chunk<COLUMNS>(place.row, place.position, column);
    }
#endif
    return load_chunk<COLUMNS>(place.row, column);
#endif
  }
};

#endif
