// Dropout of weights. Whether a weight is kept depends only on its position and on the call's
// random state, so that all kernels and tiles agree.
#pragma once

#include "params/attention.h"
#include "tile.h"

// Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
METAL_FUNC uint4 philox(uint4 counter, uint2 key) {
  UNROLL
  for (short round = 0; round < 10; round++) {
    const ulong first = ulong(0xD2511F53u) * counter.x;
    const ulong second = ulong(0xCD9E8D57u) * counter.z;
    counter = uint4(uint(second >> 32) ^ counter.y ^ key.x, uint(second),
                    uint(first >> 32) ^ counter.w ^ key.y, uint(first));
    key += uint2(0x9E3779B9u, 0xBB67AE85u);
  }
  return counter;
}

METAL_FUNC uint word_of(uint4 words, ushort index) {
  const uint low = index % 2 == 0 ? words.x : words.y;
  const uint high = index % 2 == 0 ? words.z : words.w;
  return index < 2 ? low : high;
}

// The dropped weights of one (batch, head). The four words of one draw decide about keys 4i to
// 4i + 3 of a query. A draw costs much more than a shuffle, so lanes that need words of the same
// draws compute one draw each and exchange the words.
struct Dropout {
  uint2 key;
  uint head;
  uint batch;
  uint last_dropped;
  float keep_scale;

  // rng_state: a seed and an offset, of 64 bits each, mixed into Philox's key.
  METAL_FUNC void reset(const device int64_t* rng_state, constant FlashParams& params) thread {
    if (!DROPOUT) { return; }
    const ulong seed = ulong(rng_state[0]);
    const ulong offset = ulong(rng_state[1]);
    key = philox(uint4(uint(offset), uint(offset >> 32), 0, 0), uint2(uint(seed), uint(seed >> 32)))
              .xy;
    last_dropped = params.last_dropped;
    keep_scale = params.keep_scale;
  }

  METAL_FUNC void move_to(int sequence, int query_head) thread {
    batch = sequence;
    head = query_head;
  }

  METAL_FUNC uint4 draw(uint query, uint key_index) const thread {
    return philox(uint4(key_index / 4, query, head, batch), key);
  }

  METAL_FUNC uint bit(uint word, ushort position) const thread {
    return uint(word > last_dropped) << position;
  }

  // A bit for each of the lane's elements of a [ROWS * 8, COLUMNS * 8] tile, fragment by fragment:
  // 1 if the element is kept. `row` and `column` of the lane's first element are its query and key,
  // or with TRANSPOSED its key and query. Tiles begin at multiples of 8.
  template <bool TRANSPOSED, int ROWS, int COLUMNS>
  METAL_FUNC uint kept(int row, int column) const thread {
    static_assert(!DROPOUT || ROWS * COLUMNS < 16, "bits of all fragments and one more fit in 32");
    uint bits = 0;
    if (!DROPOUT) { return bits; }
    // Two fragments at a time. If the number of fragments is odd, the last bits are not used.
    UNROLL
    for (short pair = 0; pair < ROWS * COLUMNS; pair += 2) {
      if (TRANSPOSED) {
        // Four lanes have the same two queries, and each has one of four neighbouring keys. Two
        // fragments need four draws, and a lane needs the word of its key from each draw.
        const ushort lane = row % 4;
        const short number = pair + lane / 2;
        const uint4 words = draw(column + column_offset(number % COLUMNS) + lane % 2,
                                 row + number / COLUMNS * FRAGMENT);
        bits |= bit(word_of(words, lane), 2 * pair + lane);
        UNROLL
        for (ushort step = 1; step < 4; step++) {
          const ushort other = lane ^ step;
          const uint word = simd_shuffle_xor(word_of(words, other), ushort(2 * step));
          bits |= bit(word, 2 * pair + other);
        }
      } else if (TENSOR_TILES) {
        // A lane has all four keys of a draw in two fragments.
        const uint4 words =
            draw(row + pair / COLUMNS * FRAGMENT, column + column_offset(pair % COLUMNS));
        UNROLL
        for (short i = 0; i < 4; i++) { bits |= bit(words[i], 2 * pair + i); }
      } else {
        // Four neighbouring keys are in two lanes, two keys each. Two fragments need two draws.
        const ushort lane = column % 4 / 2;
        const short number = pair + lane;
        const uint4 words =
            draw(row + number / COLUMNS * FRAGMENT, column + number % COLUMNS * FRAGMENT);
        const uint2 own_words = lane == 0 ? words.xy : words.zw;
        const uint2 other_words = lane == 0 ? words.zw : words.xy;
        bits |= bit(own_words.x, 2 * number) | bit(own_words.y, 2 * number + 1);
        const short exchanged = pair + 1 - lane;
        bits |= bit(simd_shuffle_xor(other_words.x, ushort(1)), 2 * exchanged) |
                bit(simd_shuffle_xor(other_words.y, ushort(1)), 2 * exchanged + 1);
      }
    }
    return bits;
  }

  // Sets weights that are not kept to 0.
  template <int ROWS, int COLUMNS>
  METAL_FUNC void drop(thread RegisterTile<float, ROWS, COLUMNS>& tile, uint bits) const thread {
    UNROLL
    for (short i = 0; i < ROWS; i++) {
      UNROLL
      for (short j = 0; j < COLUMNS; j++) {
        const uint first = bits >> (2 * (i * COLUMNS + j));
        const Fragment<float> value = tile.fragments[i][j];
        tile.fragments[i][j] =
            Fragment<float>((first & 1) != 0 ? value.x : 0.0f, (first & 2) != 0 ? value.y : 0.0f);
      }
    }
  }

  // Multiplies kept weights by 1 / (1 - dropout_p), and sets dropped weights to 0.
  template <int ROWS, int COLUMNS>
  METAL_FUNC void apply(thread RegisterTile<float, ROWS, COLUMNS>& tile, uint bits) const thread {
    if (DROPOUT) {
      tile.scale(keep_scale);
      drop(tile, bits);
    }
  }
};
