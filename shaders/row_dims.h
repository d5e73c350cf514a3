// Rows that are numbered by several dimensions.
#pragma once

#include "params/common.h"

// The offset of a row in elements.
METAL_FUNC int64_t row_offset(constant RowDims& dims, uint row) {
  int64_t offset = 0;
  for (short dim = 0; dim < dims.count; dim++) {
    const uint size = dims.sizes[dim];
    offset += int64_t(row % size) * dims.strides[dim];
    row /= size;
  }
  return offset;
}
