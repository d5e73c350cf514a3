// Rotary position embeddings: the first columns of a row, in pairs, rotated by the row's angles.
//
// Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), equation 34.
//
// `pairs` is the number of columns of cos and sin, R / 2. Their column p rotates the columns
//   half-rotated (GPT-NeoX, Llama):  p, p + R / 2
//   interleaved (GPT-J, the paper):  2 p, 2 p + 1
// Columns from R on are not rotated, and must not be passed to these functions.
#pragma once

using namespace metal;

// The rotated pair (x, y). -sine rotates back.
METAL_FUNC float2 rotate_pair(float x, float y, float cosine, float sine) {
  return float2(x * cosine - y * sine, y * cosine + x * sine);
}

// One column of the rotated pair. is_x: true if `value` is the pair's x, false if it is the y.
METAL_FUNC float rotate_column(float value, float partner, float cosine, float sine, bool is_x) {
  return value * cosine + partner * (is_x ? -sine : sine);
}

METAL_FUNC int rotary_x_column(int pair, bool interleaved) { return interleaved ? 2 * pair : pair; }

METAL_FUNC int rotary_y_column(int pair, int pairs, bool interleaved) {
  return interleaved ? 2 * pair + 1 : pair + pairs;
}

// The index of a column's pair, which is its column of cos and sin.
METAL_FUNC int rotary_pair(int column, int pairs, bool interleaved) {
  return interleaved ? column / 2 : (column < pairs ? column : column - pairs);
}

METAL_FUNC bool rotary_is_x(int column, int pairs, bool interleaved) {
  return interleaved ? column % 2 == 0 : column < pairs;
}

METAL_FUNC int rotary_partner(int column, int pairs, bool interleaved) {
  if (interleaved) { return column ^ 1; }
  return column < pairs ? column + pairs : column - pairs;
}
