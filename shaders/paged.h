// The pages of a cache: Kwon et al., "PagedAttention" (2023).
#pragma once

#include "tile.h"

constant constexpr int NO_PAGE = -1;
constant constexpr int PAGE_ROWS = PAGED ? PAGE_SIZE : 1;
// True if 8 rows from a multiple of 8 on are in one page.
constant constexpr bool WHOLE_FRAGMENTS = PAGED && !INDICES && PAGE_ROWS % FRAGMENT == 0;

// The pages of one sequence. A SIMD group holds the numbers of 32 pages, one in each lane, and
// shuffles them: a number is loaded once for all rows of a page. Without pages, all are in page 0.
struct PageTable {
  const device int* numbers;
  int count;       // of pages with the sequence's keys; later entries are not read
  int cache_size;  // page numbers from cache_size on are invalid
  int window;      // the table index of lane 0's page number
  int held;        // the lane's page number

  METAL_FUNC void reset(const device int* table, int kv_length, int cache_pages) thread {
    numbers = table;
    count = (kv_length + PAGE_ROWS - 1) / PAGE_ROWS;
    cache_size = cache_pages;
    window = -SIMD_LANES;
    held = NO_PAGE;
  }

  // `number`, or NO_PAGE if there is no such page: the table is the caller's memory.
  METAL_FUNC int existing(int number) const thread {
    return number < cache_size ? max(number, NO_PAGE) : NO_PAGE;
  }

  // Loads the page numbers for rows [first, first + rows), at most 32. Uniform in the SIMD group.
  METAL_FUNC void move_to(int first, int rows, ushort lane) thread {
    if (INDICES) { return; }
    const int first_place = uint(first) / PAGE_ROWS;
    const int last_place = uint(first + rows - 1) / PAGE_ROWS;
    if (first_place >= window && last_place < window + SIMD_LANES) { return; }
    window = first_place;
    const int place = window + lane;
    held = existing(place < count ? numbers[place] : NO_PAGE);
  }

  // The page of a row. All lanes of the SIMD group call it.
  METAL_FUNC int page_of(int row) const thread {
    if (!PAGED) { return 0; }
    if (INDICES) { return existing(numbers[uint(row) / PAGE_ROWS]); }
    return simd_shuffle(held, ushort(uint(row) / PAGE_ROWS - window));
  }

  // As page_of, for lanes whose rows are in [first, first + 8), where `first`, a multiple of 8, is
  // the same in all lanes. On M1 a broadcast takes a quarter of the time of a shuffle.
  METAL_FUNC int page_among(int row, int first) const thread {
    return WHOLE_FRAGMENTS ? simd_broadcast(held, ushort(uint(first) / PAGE_ROWS - window))
                           : page_of(row);
  }

  METAL_FUNC int row_in_page(int row) const thread { return PAGED ? uint(row) % PAGE_ROWS : row; }
};
