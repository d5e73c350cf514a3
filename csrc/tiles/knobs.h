// The knobs of each kernel's tile, with the names of `tune` and `explain`, in the order of the
// columns of csrc/tiles/table.inc. bench/agx reads these lines.
#pragma once

namespace metal_attn {

// X(NAME, member, minimum, maximum, step). If step is 0, the values are powers of two.

// V_SLICE: columns of v and out that a threadgroup owns; in a row of the table, the maximum. Wider
// accumulators would take all 128 registers that a thread of M1 can have.
// BLOCK_K: keys staged at a time.
// COLUMN_SIMDGROUPS: SIMD groups that share rows and have a part of the columns each.
// Q_IN_REGISTERS: if 0, q is read again for every block.
// KV_STAGED: if 1, K and V are in threadgroup memory. If 0, each SIMD group reads them itself.
#define FLASH_FWD_KNOBS(X)                         \
  X(V_SLICE, v_slice, 8, 256, 8)                   \
  X(BLOCK_K, block_k, 8, 32, 8)                    \
  X(SIMDGROUPS, simdgroups, 1, 8, 1)               \
  X(COLUMN_SIMDGROUPS, column_simdgroups, 1, 2, 1) \
  X(Q_IN_REGISTERS, q_in_registers, 0, 1, 1)       \
  X(KV_STAGED, kv_staged, 0, 1, 1)

// SLICE: like V_SLICE, for the columns of dq, or of the wider of dk and dv.
// BLOCK: rows of the other side staged at a time.
// ROW_FRAGMENTS: fragments of 8 rows that a SIMD group owns. Rows that are neither in registers nor
// in threadgroup memory are read again for every block.
#define FLASH_BWD_KNOBS(X)                         \
  X(SLICE, slice, 8, 576, 8)                       \
  X(BLOCK, block, 8, 32, 8)                        \
  X(ROW_FRAGMENTS, row_fragments, 1, 4, 0)         \
  X(SIMDGROUPS, simdgroups, 1, 8, 1)               \
  X(COLUMN_SIMDGROUPS, column_simdgroups, 1, 4, 0) \
  X(ROWS_IN_REGISTERS, rows_in_registers, 0, 1, 1) \
  X(ROWS_IN_THREADGROUP, rows_in_threadgroup, 0, 1, 1)

// ROW_FRAGMENTS: fragments of 8 queries in a tile. KEY_FRAGMENTS: fragments of 8 keys in a SIMD
// group's block. SPANS: the most spans of 32 columns that a SIMD group owns.
// VECTOR_ROWS: queries of a tile that does not use the matrix unit, or 0 for a tile that does.
// Three or four would not fit in M1's registers.
#define FLASH_DECODE_KNOBS(X)              \
  X(ROW_FRAGMENTS, row_fragments, 1, 4, 1) \
  X(KEY_FRAGMENTS, key_fragments, 1, 4, 0) \
  X(SPANS, spans, 1, 18, 1)                \
  X(VECTOR_ROWS, vector_rows, 0, 2, 1)

}  // namespace metal_attn
