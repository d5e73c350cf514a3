// score_mod and mask_mod. torch_metal_attn/flex writes function bodies from the Python functions:
// FLEX_SCORE and FLEX_MASK; FLEX_SLOPE, d score_mod / d score; FLEX_SHARE, d score_mod / d element
// of a captured tensor; and FLEX_PLACE, the index of this element.
#pragma once

#include "inputs.h"

// The default bodies change nothing.
#ifndef FLEX_SCORE
#define FLEX_SCORE return score;
#else
#define FLEX_SCORED 1
#endif
#ifndef FLEX_SLOPE
#define FLEX_SLOPE return 1.0f;
#endif
#ifndef FLEX_MASK
#define FLEX_MASK return true;
#endif
#ifndef FLEX_SHARE
#define FLEX_SHARE return 0.0f;
#define FLEX_PLACE return 0;
#endif

FEATURE(FLEX_SCORED)

// An index along a dimension of `size` elements; -1 means the last element. An index out of range
// becomes 0 and makes the score NaN.
METAL_FUNC int64_t flex_index(int64_t index, int size, thread bool& impossible) {
  const int64_t wrapped = index < 0 ? index + size : index;
  const bool outside = wrapped < 0 || wrapped >= size;
  impossible = impossible || outside;
  return outside ? 0 : wrapped;
}

// Quotients are rounded towards minus infinity, and remainders have the divisor's sign, as in
// Python. An integer division by zero makes the score NaN. x / -1 is computed as -x, because the
// smallest integer must not be divided by -1.
template <typename T>
METAL_FUNC T flex_floor_divide(T a, T b, thread bool& impossible) {
  impossible = impossible || b == 0;
  if (b == 0 || b == -1) { return T(0) - a; }
  const T quotient = a / b;
  return quotient * b != a && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

template <typename T>
METAL_FUNC T flex_truncating_divide(T a, T b, thread bool& impossible) {
  impossible = impossible || b == 0;
  return b == 0 || b == -1 ? T(0) - a : a / b;
}

template <typename T>
METAL_FUNC T flex_remainder(T a, T b, thread bool& impossible) {
  impossible = impossible || b == 0;
  const T rest = b == 0 || b == -1 ? T(0) : a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

template <typename T>
METAL_FUNC T flex_truncating_remainder(T a, T b, thread bool& impossible) {
  impossible = impossible || b == 0;
  return b == 0 || b == -1 ? T(0) : a % b;
}

template <>
METAL_FUNC float flex_truncating_remainder(float a, float b, thread bool&) {
  return fmod(a, b);
}

template <>
METAL_FUNC float flex_remainder(float a, float b, thread bool&) {
  const float rest = fmod(a, b);
  return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
}

template <>
METAL_FUNC float flex_floor_divide(float a, float b, thread bool& impossible) {
  if (b == 0.0f) { return a / b; }
  const float rest = fmod(a, b);
  const float quotient = (a - rest) / b;
  const float floored = rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? quotient - 1.0f : quotient;
  return rint(floored);
}

template <>
METAL_FUNC float flex_truncating_divide(float a, float b, thread bool&) {
  return trunc(a / b);
}

// Truncates `x`, saturates at the type's limits, and returns 0 for NaN.
METAL_FUNC int flex_int(float x) {
  return isnan(x) ? 0 : x >= 2147483648.0f ? INT_MAX : x <= -2147483648.0f ? INT_MIN : int(x);
}

METAL_FUNC int64_t flex_long(float x) {
  const float limit = 9223372036854775808.0f;
  const int64_t highest = 0x7fffffffffffffff;
  return isnan(x) ? 0 : x >= limit ? highest : x <= -limit ? -highest - 1 : int64_t(x);
}

METAL_FUNC float flex_sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }

// NaN if either argument is NaN; Metal's max and min would return the other argument.
METAL_FUNC float flex_max(float a, float b) { return isnan(a) || isnan(b) ? NAN : max(a, b); }
METAL_FUNC float flex_min(float a, float b) { return isnan(a) || isnan(b) ? NAN : min(a, b); }

// Metal lacks log1p, expm1 and erf. The errors of these are below 3 units in the last place.

// Near 0, where 1 + x loses digits: 2 artanh(x / (2 + x)) (Abramowitz and Stegun, 4.1.27, 4.6.22).
METAL_FUNC float flex_log1p(float x) {
  if (x < -0.5f || x > 1.0f) { return precise::log(1.0f + x); }
  const float y = x / (2.0f + x);
  const float t = y * y;
  float sum = 2.0f / 15.0f;
  UNROLL
  for (short n = 13; n > 0; n -= 2) { sum = fma(sum, t, 2.0f / n); }
  return y * sum;
}

// Near 0, where exp(x) - 1 loses digits, this is the sum of x^n / n!.
METAL_FUNC float flex_expm1(float x) {
  if (fabs(x) > 1.0f) { return precise::exp(x) - 1.0f; }
  float sum = 1.0f;
  UNROLL
  for (short n = 12; n > 1; n--) { sum = fma(x * sum, 1.0f / n, 1.0f); }
  return x * sum;
}

// Below 1 this is the Maclaurin series (Abramowitz and Stegun, 7.1.5). From 1 on it is
// 1 - exp(log erfc): a polynomial interpolates log erfc at the nine Chebyshev points of [1, 4].
METAL_FUNC float flex_erf(float x) {
  const float size = fabs(x);
  if (size < 1.0f) {
    const float t = x * x;
    float sum = 1.48071928e-8f;  // (-1)^n 2 / (sqrt(pi) n! (2n + 1)) for n = 10 to 0
    sum = fma(sum, t, -1.63658441e-7f);
    sum = fma(sum, t, 1.64621144e-6f);
    sum = fma(sum, t, -1.49256502e-5f);
    sum = fma(sum, t, 1.20553326e-4f);
    sum = fma(sum, t, -8.54832702e-4f);
    sum = fma(sum, t, 5.22397785e-3f);
    sum = fma(sum, t, -2.68661715e-2f);
    sum = fma(sum, t, 1.12837918e-1f);
    sum = fma(sum, t, -3.76126379e-1f);
    sum = fma(sum, t, 1.12837923f);
    return x * sum;
  }
  const float u = (size > 4.0f ? 4.0f : size) - 2.5f;
  float log_erfc = 1.6371514e-6f;
  log_erfc = fma(log_erfc, u, -1.33150143e-5f);
  log_erfc = fma(log_erfc, u, 7.72913772e-5f);
  log_erfc = fma(log_erfc, u, -4.20122524e-4f);
  log_erfc = fma(log_erfc, u, 2.16530357e-3f);
  log_erfc = fma(log_erfc, u, -1.08585414e-2f);
  log_erfc = fma(log_erfc, u, -9.43893731e-1f);
  log_erfc = fma(log_erfc, u, -5.35268068f);
  log_erfc = fma(log_erfc, u, -7.80681515f);
  const float result = 1.0f - precise::exp(log_erfc);
  return x < 0.0f ? -result : result;
}

// Shifts by any number of bits, as in PyTorch. In Metal, shifts by the width or more are undefined.
template <typename T>
METAL_FUNC T flex_right_shift(T a, T bits) {
  const bool outside = bits < 0 || uint64_t(bits) >= sizeof(T) * 8;
  return outside ? T(a < 0 ? -1 : 0) : T(a >> bits);
}

template <typename T>
METAL_FUNC T flex_left_shift(T a, T bits) {
  const bool outside = bits < 0 || uint64_t(bits) >= sizeof(T) * 8;
  return outside ? T(0) : T(uint64_t(a) << bits);
}

// The names that the function bodies may use.
#define FLEX_ARGUMENTS                                                                           \
  thread const FlashInputs &inputs, constant FlexParams &params, int batch, int head, int query, \
      int key, thread bool &impossible

METAL_FUNC float flex_score(float score, FLEX_ARGUMENTS){FLEX_SCORE}

METAL_FUNC float flex_slope(float score, FLEX_ARGUMENTS){FLEX_SLOPE}

METAL_FUNC float flex_share(float score, FLEX_ARGUMENTS){FLEX_SHARE}

METAL_FUNC int64_t flex_place(float score, FLEX_ARGUMENTS){FLEX_PLACE}

METAL_FUNC bool flex_mask(FLEX_ARGUMENTS) {
  FLEX_MASK
}

// The interface of ScoreRules, with score_mod and mask_mod.
template <int ROWS, bool TRANSPOSED>
struct FlexRules {
  int batch;
  int head;
  int row;  // of the lane's first element
  int column;
  int last_query;
  int last_key;

  METAL_FUNC void reset(thread const FlashInputs&, int score_batch, int score_head, int lane_row,
                        int lane_column, thread const Visibility&, thread const Sequence& sequence,
                        constant FlashParams&) thread {
    batch = score_batch;
    head = score_head;
    row = lane_row;
    column = lane_column;
    last_query = sequence.q_length - 1;
    last_key = sequence.kv_length - 1;
  }

  // The score in base 2 of a product of q and k. slope: the derivative of score_mod.
  METAL_FUNC float element(float product, int row, int column, bool masked,
                           thread const FlashInputs& inputs, constant FlashParams& params,
                           thread float& slope) const thread {
    const int query = min(TRANSPOSED ? column : row, last_query);
    const int key = min(TRANSPOSED ? row : column, last_key);
    bool impossible = false;
    const float scaled = product * params.softmax_scale;
    float score = product * params.scale_log2;
    if (FLEX_SCORED) {
      score = base_2(flex_score(scaled, inputs, params.flex, batch, head, query, key, impossible));
    }
    slope = flex_slope(scaled, inputs, params.flex, batch, head, query, key, impossible);
    if (masked && !flex_mask(inputs, params.flex, batch, head, query, key, impossible)) {
      score = -INFINITY;
      slope = 0.0f;
    }
    return impossible ? NAN : score;
  }

  // The index of the captured tensor's element that a score depends on; INT_MAX if the index is out
  // of range, which makes the score NaN. share: the derivative of score_mod by this element.
  METAL_FUNC int place(float product, short i, int column, thread const FlashInputs& inputs,
                       constant FlashParams& params, thread float& share) const thread {
    const int query = min(row + i * FRAGMENT, last_query);
    const int key = min(column, last_key);
    const float scaled = product * params.softmax_scale;
    bool impossible = false;
    share = flex_share(scaled, inputs, params.flex, batch, head, query, key, impossible);
    bool outside = false;
    const int64_t element =
        flex_place(scaled, inputs, params.flex, batch, head, query, key, outside);
    return outside || element < 0 || element > INT_MAX ? INT_MAX : int(element);
  }

  // Products become scores in base 2, and `slopes` become the derivatives of score_mod, for columns
  // from `first_column` on. masked: whether mask_mod is applied.
  template <int COLUMNS>
  METAL_FUNC void value_and_slope(thread RegisterTile<float, ROWS, COLUMNS>& scores,
                                  thread RegisterTile<float, ROWS, COLUMNS>& slopes,
                                  int first_column, bool masked, thread const FlashInputs& inputs,
                                  constant FlashParams& params) const thread {
    if (!FLEX_SCORED && !masked) {
      scores.scale(params.scale_log2);
      return;
    }
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      UNROLL
      for (short j = 0; j < COLUMNS; j++) {
        thread Fragment<float>& score = scores.fragments[i][j];
        const int this_row = row + i * FRAGMENT;
        const int first = first_column + column + column_offset(j);
        float first_slope;
        float second_slope;
        score = Fragment<float>(
            element(score.x, this_row, first, masked, inputs, params, first_slope),
            element(score.y, this_row, first + 1, masked, inputs, params, second_slope));
        slopes.fragments[i][j] = Fragment<float>(first_slope, second_slope);
      }
    }
  }

  template <int COLUMNS>
  METAL_FUNC void value(thread RegisterTile<float, ROWS, COLUMNS>& scores, int first_column,
                        bool masked, thread const FlashInputs& inputs,
                        constant FlashParams& params) const thread {
    RegisterTile<float, ROWS, COLUMNS> slopes;
    value_and_slope(scores, slopes, first_column, masked, inputs, params);
  }
};

template <int ROWS, bool TRANSPOSED>
using Rules = conditional_t<FLEX, FlexRules<ROWS, TRANSPOSED>, ScoreRules<ROWS, TRANSPOSED>>;
