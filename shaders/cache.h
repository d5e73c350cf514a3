// Rows of K or V that lie in pages.
#pragma once

#include "operand.h"
#include "paged.h"

#if PAGE_SIZE

// Rows COLUMNS long; with ROTATED, turned while they are read. A row of no page is MISSING bits:
// keys of NaN show in every query that sees them, so that values of 0 need not.
template <int COLUMNS, bool ROTATED, uint MISSING>
struct CacheOperand {
  PageTable pages;
  const device ELEMENT* rows;  // of page 0
  int64_t page_stride;
  int64_t row_stride;
#if K_ROTARY
  RotaryTables rotary;
#endif

  struct Place {
    const device ELEMENT* row;
    int position;
    bool exists;
  };

  METAL_FUNC Place find(int row) const thread {
    const int page = pages.page_of(row);
    const int page_row = uint(row) % PAGE_SIZE;
    return {rows + page * page_stride + page_row * row_stride, row, page != NO_PAGE};
  }

  METAL_FUNC uint4 chunk(thread const Place& place, int column) const thread {
    if (!place.exists) {
      return uint4(MISSING);
    }
#if K_ROTARY
    if (ROTATED) {
      return rotary.turn_chunk<COLUMNS>(place.row, place.position, column);
    }
#endif
    return load_chunk<COLUMNS>(place.row, column);
  }
};

#endif
