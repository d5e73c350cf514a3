// Rotary position embeddings of q and k in one dispatch, in place or not.
//
// The kernel is bound by memory. A thread owns VECTOR pairs of columns of one token, loads their
// cos and sin once, and rotates them in HEADS heads by vector loads and stores. The other threads
// of a row copy the columns that are not rotated; in place there are no such threads.
#include "features.h"
#include "rotate_rows.h"

// The host defines ELEMENT, TABLE_ELEMENT, VECTOR (1, 2 or 4), HEADS, INTERLEAVED, IN_PLACE,
// HAS_ROWS, ROWS_ARE_POSITIONS and ROW_ELEMENT.

// Copies the bits of UNIT_COLUMNS columns, from `column` on.
METAL_FUNC void copy_unit(const device ELEMENT* row, device ELEMENT* out_row, int64_t stride,
                          int64_t out_stride, int column, int head_dim) {
  if (VECTOR > 1 && column + UNIT_COLUMNS <= head_dim) {
    const device vec<ELEMENT, WIDTH>* source =
        reinterpret_cast<const device vec<ELEMENT, WIDTH>*>(row + column);
    device vec<ELEMENT, WIDTH>* destination =
        reinterpret_cast<device vec<ELEMENT, WIDTH>*>(out_row + column);
    destination[0] = source[0];
    destination[1] = source[1];
    return;
  }
  for (int c = column; c < min(column + UNIT_COLUMNS, head_dim); c++) {
    out_row[c * out_stride] = row[c * stride];
  }
}

[[kernel, max_total_threads_per_threadgroup(ROPE_THREADS)]] void rope(
    // clang-format off
    WHEN(IN_PLACE, device ELEMENT* q_out [[buffer(ROPE_Q)]],
                   device ELEMENT* k_out [[buffer(ROPE_K)]],)
    UNLESS(IN_PLACE, const device ELEMENT* q [[buffer(ROPE_Q)]],
                     const device ELEMENT* k [[buffer(ROPE_K)]],
                     device ELEMENT* q_out [[buffer(ROPE_Q_OUT)]],
                     device ELEMENT* k_out [[buffer(ROPE_K_OUT)]],)
    WHEN(HAS_ROWS, const device ROW_ELEMENT* rows [[buffer(ROPE_ROWS)]],)
    // clang-format on
    const device TABLE_ELEMENT* cos_table [[buffer(ROPE_COS)]],
    const device TABLE_ELEMENT* sin_table [[buffer(ROPE_SIN)]],
    constant RopeParams& params [[buffer(ROPE_PARAMS)]],
    uint3 position [[thread_position_in_grid]]) {
  WHEN(IN_PLACE, const device ELEMENT* q = q_out; const device ELEMENT* k = k_out;)
  const int unit = position.x;
  const int token = position.y;
  const uint groups = params.head_groups;
  const int64_t batch = position.z / groups;
  const int first_head = int(position.z % groups) * HEADS;
  if (unit >= params.units || token >= params.length || batch >= params.batch) { return; }

  const device ELEMENT* q_token = q + batch * params.q_strides.batch + token * params.q_strides.row;
  const device ELEMENT* k_token = k + batch * params.k_strides.batch + token * params.k_strides.row;
  device ELEMENT* q_out_token =
      q_out + batch * params.q_out_strides.batch + token * params.q_out_strides.row;
  device ELEMENT* k_out_token =
      k_out + batch * params.k_out_strides.batch + token * params.k_out_strides.row;
  const bool rotates = unit < params.pair_units;
  const int pair = unit * VECTOR;
  const PairColumns columns = pair_columns(pair, params.pairs);

  PairAngles angles;
  if (rotates) {
    int64_t row = token + params.seqlen_offset;
    // clang-format off
    WHEN(HAS_ROWS, row = ROWS_ARE_POSITIONS
                       ? rows[batch * params.rows_batch_stride + token * params.rows_token_stride]
                       : row + rows[batch * params.rows_batch_stride];)
    // clang-format on
    angles.load(cos_table, sin_table, batch, row, pair, params);
  }

  UNROLL
  for (short h = 0; h < HEADS; h++) {
    const int head = first_head + h;
    if (head < params.heads) {
      const bool in_q = head < params.q_heads;
      const int64_t k_head = head - params.q_heads;
      const device ELEMENT* row =
          in_q ? q_token + head * params.q_strides.head : k_token + k_head * params.k_strides.head;
      device ELEMENT* out_row = in_q ? q_out_token + head * params.q_out_strides.head
                                     : k_out_token + k_head * params.k_out_strides.head;
      const int64_t stride = in_q ? params.q_strides.column : params.k_strides.column;
      const int64_t out_stride = in_q ? params.q_out_strides.column : params.k_out_strides.column;
      if (rotates) {
        rotate_pairs(row, stride, out_row, out_stride, columns, angles, params);
      } else {
        const int column = UNIT_COLUMNS * unit;
        copy_unit(row, out_row, stride, out_stride, column, params.head_dim);
      }
    }
  }
}
