// Turns products into scores by apply_rules, ALiBi, bias and mask, in this order. Scores are in
// base 2, that is multiplied by log2(e).
#pragma once

#include "base_2.h"
#include "mask.h"

UNLESS(BIAS, using BIAS_ELEMENT = float;)

// Two neighbouring elements in one load.
template <typename T>
METAL_FUNC Fragment<T> load_pair(const device T* first) {
  return *reinterpret_cast<const device Fragment<T>*>(first);
}

// One load of 16 bits: a compiler would load a vector of two bytes in two loads.
METAL_FUNC Fragment<uchar> load_pair(const device uchar* first) {
  const ushort both = *reinterpret_cast<const device ushort*>(first);
  return Fragment<uchar>(uchar(both & 0xff), uchar(both >> 8));
}

// A lane's rows of a mask or bias. With PAIRS, columns 2i and 2i + 1 are one aligned vector.
template <typename T, int ROWS, bool PAIRS>
struct MaskRows {
  const device T* tensor;
  Offset rows[ROWS];
  Offset column_stride;
  int last_column;

  // TRANSPOSED: a row is a key. Row indices after the last row give the last row.
  template <bool TRANSPOSED>
  METAL_FUNC void reset(const device T* mask, constant MaskStrides& strides, int batch, int head,
                        int row, int last_query, int last_key) thread {
    tensor = mask;
    const Offset first =
        Offset(batch) * Offset(strides.batch) + Offset(head) * Offset(strides.head);
    const int last_row = TRANSPOSED ? last_key : last_query;
    const Offset row_stride = Offset(TRANSPOSED ? strides.key : strides.query);
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      rows[i] = first + Offset(min(row + i * FRAGMENT, last_row)) * row_stride;
    }
    column_stride = Offset(TRANSPOSED ? strides.query : strides.key);
    last_column = TRANSPOSED ? last_query : last_key;
  }

  // Columns `column` and `column + 1` of a row. After the last column, existing columns are loaded.
  METAL_FUNC Fragment<T> pair(short row, int column) const thread {
    if (PAIRS) { return load_pair(tensor + (rows[row] + min(column, last_column - 1))); }
    return Fragment<T>(tensor[rows[row] + Offset(min(column, last_column)) * column_stride],
                       tensor[rows[row] + Offset(min(column + 1, last_column)) * column_stride]);
  }
};

// Turns products of one (sequence, head) into scores. A row of the tile is a query and a column is
// a key, or with TRANSPOSED a row is a key and a column is a query.
template <int ROWS, bool TRANSPOSED>
struct ScoreRules {
  int lane_column;
  float slope_log2;  // ALIBI
  int64_t distance;  // row minus column of the lane's first element, in the block at 0 (ALIBI)
  MaskRows<uchar, ROWS, MASK_PAIRS && !TRANSPOSED> mask;
  MaskRows<BIAS_ELEMENT, ROWS, BIAS_PAIRS && !TRANSPOSED> bias;

  // row, column: of the lane's first element in the tile whose block begins at 0.
  template <typename Inputs>
  METAL_FUNC void reset(thread const Inputs& inputs, int batch, int head, int row, int column,
                        thread const Visibility& visible, thread const Sequence&,
                        constant FlashParams& params) thread {
    const int last_query = visible.q_length - 1;
    const int last_key = params.kv_length - 1;
    lane_column = column;
    if (ALIBI) {
      slope_log2 = inputs.alibi_slopes[batch * params.alibi_batch_stride + head] * M_LOG2E_F;
      distance = row - column + (TRANSPOSED ? -visible.q_offset : visible.q_offset);
    }
    if (MASK) {
      mask.template reset<TRANSPOSED>(inputs.attn_mask, params.mask_strides, batch, head, row,
                                      last_query, last_key);
    }
    if (BIAS) {
      bias.template reset<TRANSPOSED>(inputs.attn_bias, params.bias_strides, batch, head, row,
                                      last_query, last_key);
    }
  }

  // Applies the functions of a score: functions of the product, then the scale to base 2, then
  // functions of a score in base 2. Each function multiplies `slope` by its derivative.
  METAL_FUNC void apply_rules(thread Fragment<float>& score, thread Fragment<float>& slope,
                              constant FlashParams& params) const thread {
    if (SOFTCAP) {
      // cap * tanh(product * scale / cap) of Gemma 2 (2024).
      const Fragment<float> capped = precise::tanh(score * params.scale_over_cap);
      score = capped * params.cap_log2;
      slope = slope * (1.0f - capped * capped);
    } else {
      score = score * params.scale_log2;
    }
  }

  // Products become scores, for columns from `first_column` on. masked: attn_mask is applied.
  template <int COLUMNS, typename Inputs>
  METAL_FUNC void value(thread RegisterTile<float, ROWS, COLUMNS>& scores, int first_column,
                        bool masked, thread const Inputs&,
                        constant FlashParams& params) const thread {
    apply<false>(scores, scores, first_column, masked, params);
  }

  // With SCORE_DERIVATIVES, `slopes` becomes d score / d product without the factor softmax_scale.
  template <int COLUMNS, typename Inputs>
  METAL_FUNC void value_and_slope(thread RegisterTile<float, ROWS, COLUMNS>& scores,
                                  thread RegisterTile<float, ROWS, COLUMNS>& slopes,
                                  int first_column, bool masked, thread const Inputs&,
                                  constant FlashParams& params) const thread {
    apply<SCORE_DERIVATIVES>(scores, slopes, first_column, masked, params);
  }

  template <bool WITH_SLOPES, int COLUMNS>
  METAL_FUNC void apply(thread RegisterTile<float, ROWS, COLUMNS>& scores,
                        thread RegisterTile<float, ROWS, COLUMNS>& slopes, int first_column,
                        bool masked, constant FlashParams& params) const thread {
    const float block_distance = ALIBI ? float(distance - first_column) : 0.0f;
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      UNROLL
      for (short j = 0; j < COLUMNS; j++) {
        thread Fragment<float>& score = scores.fragments[i][j];
        Fragment<float> slope = Fragment<float>(1.0f, 1.0f);
        apply_rules(score, slope, params);
        if (WITH_SLOPES) { slopes.fragments[i][j] = slope; }
        if (ALIBI) {
          // slope * |distance| of Press et al., "Train Short, Test Long" (2021).
          const float first = block_distance + float(i * FRAGMENT - column_offset(j));
          score -= slope_log2 * Fragment<float>(fabs(first), fabs(first - 1.0f));
        }
        const int column = first_column + lane_column + column_offset(j);
        if (BIAS) {
          const Fragment<BIAS_ELEMENT> added = bias.pair(i, column);
          score += Fragment<float>(base_2(added.x), base_2(added.y));
        }
        if (MASK && masked) {
          const Fragment<uchar> shown = mask.pair(i, column);
          score = Fragment<float>(shown.x ? score.x : -INFINITY, shown.y ? score.y : -INFINITY);
        }
      }
    }
  }
};
