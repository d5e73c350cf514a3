// The arguments of ops that read or write a KV cache.
#pragma once

#include <cstdint>

#include "csrc/problem/element.h"
#include "csrc/problem/tensor.h"
#include "shaders/params/kv_formats.h"

namespace metal_attn {

// The words for types and defaults in the lists of options.
using Flag = bool;
using Integer = int64_t;
inline constexpr std::nullopt_t None = std::nullopt;
inline constexpr bool False = false;
inline constexpr bool True = true;
#define OPTION_FIELD(TYPE, NAME, DEFAULT, STEP) TYPE NAME = DEFAULT;

// X(storage format of k or v, its number in params, its name in messages and keys of tuned tables).
// torch_metal_attn/quantisation.py explains the formats.
#define KV_FORMATS(X)                    \
  X(kPlain, 0, "not quantised")          \
  X(kQ8_0, KV_Q8_0, "q8_0")              \
  X(kQ4_0, KV_Q4_0, "q4_0")              \
  X(kFp8E4m3, KV_FP8_E4M3, "fp8_e4m3")   \
  X(kQ2G32, KV_GROUPED(2, 32), "q2_g32") \
  X(kQ2G64, KV_GROUPED(2, 64), "q2_g64") \
  X(kQ3G32, KV_GROUPED(3, 32), "q3_g32") \
  X(kQ3G64, KV_GROUPED(3, 64), "q3_g64") \
  X(kQ4G32, KV_GROUPED(4, 32), "q4_g32") \
  X(kQ4G64, KV_GROUPED(4, 64), "q4_g64")

#define FORMAT_NUMBER(NAME, NUMBER, TEXT) NAME = NUMBER,
enum class KvFormat { KV_FORMATS(FORMAT_NUMBER) };
#undef FORMAT_NUMBER

constexpr const char* format_name(KvFormat format) {
#define FORMAT_TEXT(NAME, NUMBER, TEXT) format == KvFormat::NAME ? TEXT:
  return KV_FORMATS(FORMAT_TEXT) "";
#undef FORMAT_TEXT
}

struct KvFormats {
  KvFormat k = KvFormat::kPlain;
  KvFormat v = KvFormat::kPlain;

  bool quantised() const { return k != KvFormat::kPlain; }
  bool operator==(const KvFormats&) const = default;
};

// Bytes of one load of k or v: as many codes as 16 bytes of `element` hold. Grouped formats load
// one element of the tensor, which holds 8 codes, or a third of 8 codes of 3 bits.
constexpr int kv_load_bytes(Element element, KvFormat kv_format) {
  const int format = static_cast<int>(kv_format);
  if (kv_grouped(format)) { return kv_bits(format) == 3 ? 1 : kv_bits(format); }
  return kv_format == KvFormat::kPlain ? 16 : 16 / element_bytes(element) * kv_bits(format) / 8;
}

// How a cache differs from a dense tensor of q's dtype.
struct CacheFeatures {
  std::optional<Element> element;  // of k and v if it differs from q's and they are not quantised
  int page_size = 0;               // keys of a page; 0 without pages
  bool batch_idx = false;
  KvFormats formats;
  bool k_scale = false;
  bool v_scale = false;
  int hadamard = 0;  // size of the Hadamard matrix

  bool operator==(const CacheFeatures&) const = default;
};

// Names of q, k and v in messages.
struct CacheNames {
  const char* q = "q";
  const char* k = "k";
  const char* v = "v";
};
// The names in ops that append k and v to a cache.
inline constexpr CacheNames kAppendNames{"k", "k_cache", "v_cache"};

struct CheckedCache {
  KvFormats formats;
  int32_t batch;     // sequences
  int32_t capacity;  // of a sequence, in rows
};

// torch_metal_attn/reference.py, `cached`, and quantisation.py explain the options.
struct CacheOptions {
  OptionalTensor block_table;
  OptionalTensor cache_batch_idx;
  OptionalTensor k_scale;
  OptionalTensor v_scale;
  CacheNames names = {};
  std::optional<CheckedCache> checked = std::nullopt;  // results of append_kv's checks, if they ran

  // True if k and v hold more than this call's keys. Then they have 4 dimensions, even if q is
  // packed, and their batch size is independent of q's.
  bool indexed() const { return block_table || cache_batch_idx; }
};

// The keys [begin, end) are visible to some query of a sequence.
struct SeenKeys {
  int64_t begin;
  int64_t end;
};

// Offsets of each sequence's packed queries and packed new rows: (B + 1) int32.
struct PackedRows {
  Tensor cu_seqlens_q;
  Tensor cu_seqlens_k_new;
  const char* k_new_name;  // name of cu_seqlens_k_new in messages: it may be cu_seqlens_q
};

// The options of append_kv's rotation: X(type, name, default, STEP or NO_STEP).
#define ROTARY_OPTIONS(X)                   \
  X(OptionalTensor, rotary_cos, None, STEP) \
  X(OptionalTensor, rotary_sin, None, STEP) \
  X(Flag, rotary_interleaved, False, STEP)  \
  X(Flag, rotate_q_by_token, True, STEP)    \
  X(Flag, rotary_from_leftpad, True, STEP)  \
  X(Integer, rotary_first_column, 0, STEP)

struct RotaryOptions {
  ROTARY_OPTIONS(OPTION_FIELD)
};

// k: (B, Hkv, L, D) and v: (B, Hkv, L, Dv) in float32, float16 or bfloat16, the last stride 1. With
// `packed`, k, v and q have packed rows (T, H, D). Indices are int32, (B) or (B, blocks).
// - Row i of sequence b is written to row cache_seqlens[b] + i of the sequence's cache. This
//   cache is batch cache_batch_idx[b], or b, of k_cache (Bc, Hkv, capacity, D) and of v_cache. In a
//   paged cache (pages, Hkv, page, D), row r is row r % page of page block_table[b, r / page].
// - Caches have k's dtype, or half precision if k has float32, or a format of
//   torch_metal_attn/quantisation.py with its scales.
// - rotary_cos and rotary_sin (rows, R / 2) rotate columns [rotary_first_column,
//   rotary_first_column + R) of k. Row i uses row cache_seqlens[b] + i of the tables, minus
//   leftpad_k[b] if rotary_from_leftpad.
// - Token i of q (B, Hq, Lq, D) is rotated in place by the same row, or, without rotate_q_by_token,
//   by the row of token 0.
// - v_cache may be the unrotated first columns of k_cache. Then v must be the first columns of k.
// - With `hadamard`, blocks of `hadamard` columns of v and of the rotated k are multiplied by a
//   Hadamard matrix before they are quantised.
struct AppendKvArguments : RotaryOptions {
  Tensor k;
  Tensor v;
  Tensor k_cache;
  Tensor v_cache;
  OptionalTensor cache_seqlens;
  OptionalTensor q;
  OptionalTensor leftpad_k;
  CacheOptions cache;
  int64_t hadamard = 0;
  std::optional<PackedRows> packed = std::nullopt;
};

struct AppendKvProblem {
  Element element;
  KvFormats formats;
  std::optional<Element> cache_element;  // if it differs from k's and they are not quantised
  int32_t batch;
  int32_t kv_heads;
  int32_t length;  // new rows of each sequence; packed: of all sequences
  int32_t head_dim_qk;
  int32_t head_dim_v;
  int32_t capacity;    // of a sequence, in rows
  int32_t cache_size;  // batches or pages of the caches
  int32_t page_size;   // 0: not paged
  int32_t pairs;       // columns of rotary_cos
  int32_t first_rotated;
  bool v_in_k;  // v_cache and v are the first columns of k_cache and k
  int32_t table_rows;
  Element table_element;
  int hadamard;
  int32_t q_heads;
  int32_t q_length;  // tokens of q, counted like `length`

  bool writes() const { return batch > 0 && kv_heads > 0 && length > 0; }
  bool rotates_q() const { return batch > 0 && q_heads > 0 && q_length > 0 && pairs > 0; }
};

}  // namespace metal_attn
