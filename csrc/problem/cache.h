// K and V that outlive a call: what ops that read or write a cache are told of it.
#pragma once

#include <cstdint>

#include "csrc/problem/element.h"
#include "csrc/problem/tensor.h"
#include "shaders/params/kv_formats.h"

namespace metal_attn {

// Types and defaults of lists of options, by a schema's words.
using Flag = bool;
using Integer = int64_t;
inline constexpr std::nullopt_t None = std::nullopt;
inline constexpr bool False = false;
inline constexpr bool True = true;
#define OPTION_FIELD(TYPE, NAME, DEFAULT, STEP) TYPE NAME = DEFAULT;

// X(how the numbers of k and v are kept, in params, and in messages and keys of tuned tables): see
// torch_metal_attn/quantisation.py.
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

// How k is kept, and how v is.
struct KvFormats {
  KvFormat k = KvFormat::kPlain;
  KvFormat v = KvFormat::kPlain;

  bool quantised() const { return k != KvFormat::kPlain; }
  bool operator==(const KvFormats&) const = default;
};

// Bytes of one load of k or v: those that 16 bytes of `element` are made of, or of grouped formats
// an element, which is 8 codes or a third of them.
constexpr int kv_load_bytes(Element element, KvFormat kv_format) {
  const int format = static_cast<int>(kv_format);
  if (kv_grouped(format)) { return kv_bits(format) == 3 ? 1 : kv_bits(format); }
  return kv_format == KvFormat::kPlain ? 16 : 16 / element_bytes(element) * kv_bits(format) / 8;
}

// How a cache differs from one tensor of q's dtype.
struct CacheFeatures {
  std::optional<Element> element;  // of k and v where it is not q's, and they are not quantised
  int page_size = 0;               // keys of a page; 0 without pages
  bool batch_idx = false;
  KvFormats formats;
  bool k_scale = false;
  bool v_scale = false;
  int hadamard = 0;  // columns of the blocks in which rows are rotated

  bool operator==(const CacheFeatures&) const = default;
};

// The names of q, k and v in messages.
struct CacheNames {
  const char* q = "q";
  const char* k = "k";
  const char* v = "v";
};
// In ops that append k and v to a cache.
inline constexpr CacheNames kAppendNames{"k", "k_cache", "v_cache"};

struct CheckedCache {
  KvFormats formats;
  int32_t batch;     // of the sequences
  int32_t capacity;  // rows that a sequence may have
};

// torch_metal_attn/reference.py, `cached`, and quantisation.py explain the options.
struct CacheOptions {
  OptionalTensor block_table;
  OptionalTensor cache_batch_idx;
  OptionalTensor k_scale;
  OptionalTensor v_scale;
  CacheNames names = {};
  std::optional<CheckedCache> checked = std::nullopt;  // results of append_kv's checks, if it ran

  // True if k and v hold more than this call's keys: then they have 4 dimensions, and a batch of
  // their own, even if q is packed.
  bool indexed() const { return block_table || cache_batch_idx; }
};

// The keys that some query of a sequence may see: [begin, end).
struct SeenKeys {
  int64_t begin;
  int64_t end;
};

// The first row of each packed sequence's queries and new rows: (B + 1) int32.
struct PackedRows {
  Tensor cu_seqlens_q;
  Tensor cu_seqlens_k_new;
  const char* k_new_name;  // of the latter in messages, as it may be the former
};

// X(type, name, default, whether decode_step has it) of append_kv's rotation, as in its schema.
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

// k: (B, Hkv, L, D) and v: (B, Hkv, L, Dv) in float32, float16 or bfloat16, the last stride 1.
// Row i of sequence b becomes row cache_seqlens[b] + i of what is sequence b's in
//   k_cache (Bc, Hkv, capacity, D) and v_cache alike: batch cache_batch_idx[b], or b;
//   k_cache (pages, Hkv, page, D): row r is row r % page of page block_table[b, r / page].
// Caches have k's dtype, or half precision where that is float32, or one of
// torch_metal_attn/quantisation.py's formats with its scales.
// rotary_cos and rotary_sin (rows, R / 2) rotate row i of k by their row cache_seqlens[b] + i, less
// leftpad_k[b] if rotary_from_leftpad: its columns [rotary_first_column, rotary_first_column + R).
// v_cache may be the first columns of k_cache, as far as none of them is rotated; then v must be
// those of k. With `hadamard` blocks of as many columns of k (rotated before) and v are multiplied
// by a Hadamard matrix before they are quantised. Token i of q (B, Hq, Lq, D) is rotated in place
// by the same row, or unless rotate_q_by_token by that of i = 0. Indices are int32, (B) or (B,
// blocks). With `packed`, k, v and q have packed rows, (T, H, D), and sequences differ in their
// number.
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
  std::optional<Element> cache_element;  // where it is not k's, and they are not quantised
  int32_t batch;
  int32_t kv_heads;
  int32_t length;  // new rows of each sequence, or packed ones of all
  int32_t head_dim_qk;
  int32_t head_dim_v;
  int32_t capacity;    // rows that a sequence may have
  int32_t cache_size;  // batches or pages of the caches
  int32_t page_size;   // 0: not paged
  int32_t pairs;       // columns of rotary_cos
  int32_t first_rotated;
  bool v_in_k;  // v_cache is the first columns of k_cache, and v those of k
  int32_t table_rows;
  Element table_element;
  int hadamard;
  int32_t q_heads;
  int32_t q_length;  // likewise

  bool writes() const { return batch > 0 && kv_heads > 0 && length > 0; }
  bool rotates_q() const { return batch > 0 && q_heads > 0 && q_length > 0 && pairs > 0; }
};

}  // namespace metal_attn
