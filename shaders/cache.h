// Rows of K or V that are in pages, quantised, or both.
#pragma once

#include "operand.h"
#include "paged.h"
#include "quantised.h"

// Rows at a fixed stride in pages at a fixed stride. Without pages, all rows are in page 0.
template <typename T>
struct PagedRows {
  const device T* tensor;
  Offset first;
  Offset page_stride;
  Offset row_stride;

  METAL_FUNC void reset(const device T* own_tensor, constant RowStrides& strides, int batch,
                        int head, int row) thread {
    tensor = own_tensor;
    first = row_offset(strides, batch, head, row);
    page_stride = Offset(strides.batch);
    row_stride = Offset(strides.row);
  }

  METAL_FUNC Offset row(int page, int page_row) const thread {
    return first + Offset(page) * page_stride + Offset(page_row) * row_stride;
  }
};

// Rows of COLUMNS columns; with ROTATED they are rotated as they are read. In rows of a missing
// page, each 32 bits are MISSING: keys are NaN, as are outputs that depend on them; values are 0.
template <int FORMAT, int COLUMNS, bool ROTATED, uint MISSING>
struct CacheOperand {
  using Element = CacheElement<FORMAT>;
  using Scale = ScaleElement<FORMAT>;
  PagedRows<Element> data;
  PageTable pages;
  PagedRows<Scale> scales;  // kv_row_scales
  float scale;              // the scale of all rows, in fp8_e4m3
  RotaryTables rotary;

  struct Place {
    Offset row;
    Offset scales;
    int position;
    bool exists;
  };

  METAL_FUNC void reset(const device Element* tensor, constant RowStrides& strides, int batch,
                        int head, int first) thread {
    data.reset(tensor, strides, batch, head, first);
    scale = 1.0f;
  }

  METAL_FUNC void reset_pages(const device int* table, int kv_length, int cache_pages) thread {
    pages.reset(table, kv_length, cache_pages);
  }

  // fp8_e4m3 has a scale for each (batch, head). Other formats have scales for each row.
  METAL_FUNC void reset_scale(const device Scale* tensor, constant RowStrides& strides, int batch,
                              int head, int cache_batch, int first) thread {
    if (kv_row_scales(FORMAT)) {
      scales.reset(tensor, strides, cache_batch, head, first);
    } else {
      scale = float(tensor[batch * strides.batch + head * strides.head]);
    }
  }

  // Call it before `find` of rows [first, first + rows), in uniform control flow of the SIMD group.
  METAL_FUNC void move_to(int first, int rows, ushort lane) thread {
    if (PAGED) { pages.move_to(first, rows, lane); }
  }

  template <typename Other>
  METAL_FUNC void use_pages_of(thread const Other& other) thread {
    pages = other.pages;
  }

  METAL_FUNC Place find(int row) const thread { return find_in(pages.page_of(row), row); }

  METAL_FUNC int page_among(int row, int first) const thread {
    return pages.page_among(row, first);
  }

  METAL_FUNC Place find_in(int page, int row) const thread {
    const int page_row = pages.row_in_page(row);
    Place place;
    place.row = data.row(page, page_row);
    if (kv_row_scales(FORMAT)) { place.scales = scales.row(page, page_row); }
    place.position = row;
    place.exists = page >= 0;
    return place;
  }

  // For kernels that multiply by a span's scale themselves: 8 codes from `column` on, and the scale
  // of a span. In a row of a missing page, codes are 0 and scales have the bits MISSING.
  METAL_FUNC uint2 codes(thread const Place& place, int column) const thread {
    return place.exists ? load_codes<FORMAT, COLUMNS, FRAGMENT>(data.tensor, place.row, column)
                        : uint2(0);
  }

  METAL_FUNC float span_scale(thread const Place& place, int span) const thread {
    return place.exists ? float(scales.tensor[place.scales + span]) : as_type<float>(MISSING);
  }

  METAL_FUNC GroupScale group_scale(thread const Place& place, int column) const thread {
    GroupScale result = {scale, 0.0f};
    if (kv_row_scales(FORMAT)) {
      const device Scale* numbers =
          scales.tensor +
          (place.scales + column / kv_scale_columns(FORMAT) * kv_scale_numbers(FORMAT));
      result.scale = float(numbers[0]);
      result.minimum = kv_grouped(FORMAT) ? float(numbers[1]) : 0.0f;
    }
    return result;
  }

  METAL_FUNC uint4 chunk(thread const Place& place, int column) const thread {
    if (!place.exists) { return uint4(MISSING); }
    if (FORMAT != 0) {
      return dequantised_chunk<FORMAT, ELEMENT, COLUMNS>(data.tensor, place.row, column,
                                                         group_scale(place, column));
    }
    if (ROTATED) {
      return rotary.rotated_chunk<COLUMNS>(data.tensor, place.row, place.position, column);
    }
    return load_chunk<COLUMNS>(data.tensor, place.row, column);
  }
};
