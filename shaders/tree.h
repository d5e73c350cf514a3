// New tokens of a sequence that form a tree: the sequence's last keys, each with a query. Miao et
// al., "SpecInfer" (2024).
#pragma once

#include "params/append.h"
#include "tile.h"

// A set of new tokens, one bit each.
struct TokenSet {
  uint2 bits;

  METAL_FUNC void add(int token) thread {
    const uint bit = 1u << (token % 32);
    bits |= token < 32 ? uint2(bit, 0) : uint2(0, bit);
  }

  METAL_FUNC bool has(int token) const thread {
    const uint word = token < 32 ? bits.x : bits.y;
    return token < TREE_TOKENS && (word >> (token % 32) & 1u) != 0;
  }

  METAL_FUNC int count_before(int token) const thread {
    const uint mask = (1u << (token % 32)) - 1u;
    return token < 32 ? int(popcount(bits.x & mask))
                      : int(popcount(bits.x) + popcount(bits.y & mask));
  }

  // Removes the first `count` tokens of the set.
  METAL_FUNC void drop_first(int count) thread {
    for (int i = 0; i < count && (bits.x | bits.y) != 0; i++) {
      if (bits.x != 0) {
        bits.x &= bits.x - 1u;
      } else {
        bits.y &= bits.y - 1u;
      }
    }
  }
};

// The tokens and keys that a new token's query sees.
struct TreeToken {
  TokenSet seen;  // new tokens
  int begin;      // the first old key
  int depth;      // number of earlier tokens on its path; negative if the tree is invalid

  METAL_FUNC uint4 words() const thread { return uint4(seen.bits, uint(begin), uint(depth)); }
};

static_assert(TREE_TOKENS * sizeof(uint4) == TREE_BYTES, "TREE_BYTES holds all tokens");

// The depth of a token of an invalid tree. No table of cos and sin has a row for it.
constant constexpr int NO_DEPTH = -0x40000000;

// The new tokens of one sequence.
struct TokenTree {
  const threadgroup uint4* tokens;  // TreeToken::words of each token
  int count;

  METAL_FUNC TreeToken token(int index) const thread {
    const uint4 words = tokens[index];
    return {{words.xy}, int(words.z), int(words.w)};
  }

  METAL_FUNC int depth_of(int token) const thread {
    return token < count ? int(tokens[token].w) : NO_DEPTH;
  }
};

// The caller's tree of one sequence's new tokens. Nothing outside the sequence's rows is read,
// whatever the tree holds.
struct TreeInput {
  const device int* parents;  // TREE_PARENTS: an earlier token for each token, or -1
  const device uchar* rows;   // TREE_MASK
  int64_t row_stride;
  int count;

  // A token and its ancestors, or its row of the mask. possible: whether the parents or the row are
  // valid, so that the token sees itself and no later token.
  METAL_FUNC TokenSet seen_by(int token, thread bool& possible) const thread {
    TokenSet seen;
    seen.bits = uint2(0);
    possible = true;
    for (int i = 0; TREE_MASK && i < count; i++) {
      const bool shown = rows[token * row_stride + i] != 0;
      possible = possible && (i == token ? shown : i < token || !shown);
      if (shown) { seen.add(i); }
    }
    for (int next = token; TREE_PARENTS && possible && next >= 0;) {
      seen.add(next);
      const int parent = parents[next];
      possible = parent >= -1 && parent < next;
      next = parent;
    }
    return seen;
  }

  METAL_FUNC TreeToken token(int index) const thread {
    bool possible;
    const TokenSet seen = seen_by(index, possible);
    return {seen, 0, possible ? seen.count_before(index) : NO_DEPTH};
  }
};
