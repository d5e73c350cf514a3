// Which of a sequence's new tokens a query sees, where they form a tree: the last keys of the
// sequence, 64 at most, of which each has a query. Miao et al., "SpecInfer" (2024).
#pragma once

#include <metal_integer>

#include "features.h"
#include "tile.h"

// A bit a new token.
struct TokenSet {
  uint2 bits;

  METAL_FUNC void add(int token) thread {
    const uint bit = 1u << (token % 32);
    bits |= token < 32 ? uint2(bit, 0) : uint2(0, bit);
  }

  METAL_FUNC bool has(int token) const thread {
    const uint word = token < 32 ? bits.x : bits.y;
    return token < 64 && (word >> (token % 32) & 1u) != 0;
  }

  METAL_FUNC bool empty() const thread { return (bits.x | bits.y) == 0; }

  METAL_FUNC int count_before(int token) const thread {
    const uint mask = (1u << (token % 32)) - 1u;
    return token < 32 ? int(popcount(bits.x & mask))
                      : int(popcount(bits.x) + popcount(bits.y & mask));
  }

  METAL_FUNC void drop_first(int count) thread {
    for (int i = 0; i < count && !empty(); i++) {
      if (bits.x != 0) {
        bits.x &= bits.x - 1u;
      } else {
        bits.y &= bits.y - 1u;
      }
    }
  }
};

// The new tokens of one sequence. The caller's memory tells of them: whatever it holds, nothing
// outside the sequence's own rows of it is read.
struct TokenTree {
  const device int* parents;  // TREE_PARENTS: of each token an earlier one, or -1
  const device uchar* rows;   // TREE_MASK
  int64_t row_stride;
  int tokens;

  METAL_FUNC void reset(const device int* own_parents, const device uchar* own_rows,
                        int64_t own_row_stride, int count) thread {
    parents = own_parents;
    rows = own_rows;
    row_stride = own_row_stride;
    tokens = count;
  }

  // What a token sees: itself and its ancestors, or its row of the mask. Empty if that is no tree:
  // a token does not see itself, or sees a later one.
  METAL_FUNC TokenSet seen_by(int token) const thread {
    TokenSet seen;
    seen.bits = uint2(0);
    bool possible = token < tokens;
    if (TREE_MASK) {
      for (int i = 0; i < tokens; i++) {
        const bool shown = rows[token * row_stride + i] != 0;
        possible = possible && (i == token ? shown : i < token || !shown);
        if (shown) {
          seen.add(i);
        }
      }
    }
    for (int own = token; TREE_PARENTS && possible && own >= 0;) {
      seen.add(own);
      const int parent = parents[own];
      possible = parent >= -1 && parent < own;
      own = parent;
    }
    seen.bits = possible ? seen.bits : uint2(0);
    return seen;
  }

  // How far behind the first new token it stands; below 0 without a place.
  METAL_FUNC int depth_of(int token) const thread {
    const TokenSet seen = seen_by(token);
    return seen.empty() ? -0x40000000 : seen.count_before(token);
  }
};
