// How a kernel is specialised for a problem: every tuning number of the host side is in
// heuristics.cpp. Pure functions of plain data.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "csrc/runtime/launch.h"
#include "shaders/params.h"

namespace metal_attn {

enum class Element { kFloat, kHalf, kBfloat };

int element_bytes(Element element);
const char* element_name(Element element);  // Metal's: float, half, bfloat

// Whether every 16-byte chunk of the columns that are turned meets its partners in one chunk.
bool turns_by_chunks(Element element, int rotary_dim, bool interleaved);

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Splits of the keys, at most: a merge of more would be a walk of its own.
inline constexpr int64_t kMaxSplits = 1024;

// Rotary tables that are applied while q or k is loaded.
struct FusedRotary {
  Element element;  // of the tables
  int dim;          // columns that are rotated
  bool interleaved;
  bool q;
  bool k;
  bool aligned;  // every row of every table is 16-byte aligned
};

// A bool mask, or a bias.
struct MaskOperand {
  Element element;  // of a bias
  bool pairs;       // two neighbouring keys can be read as one aligned vector
};

// How the numbers of k and v are kept: see torch_metal_attn/quantisation.py.
enum class KvFormat {
  kPlain = 0,
  kQ8_0 = KV_Q8_0,
  kQ4_0 = KV_Q4_0,
  kFp8E4m3 = KV_FP8_E4M3,
};

// Bytes that 16 bytes of `element` are made of: those of one load of k or v.
int kv_load_bytes(Element element, KvFormat format);

// What a cache is beyond one tensor of q's dtype.
struct CacheFeatures {
  std::optional<Element> element;  // of k and v where it is not q's, and they are not quantised
  int page_size = 0;               // keys of a page; 0 without pages
  bool batch_idx = false;
  KvFormat format = KvFormat::kPlain;
  bool k_scale = false;
  bool v_scale = false;
};

// What is compiled in only where a call needs it.
struct FlashFwdFeatures {
  bool band = false;   // a window or the diagonal hides some key from some query
  bool chunk = false;  // queries see their own chunk
  bool varlen = false;
  bool seqused_k = false;
  bool leftpad_k = false;
  std::optional<MaskOperand> mask;
  std::optional<MaskOperand> bias;
  bool softcap = false;
  bool alibi = false;
  std::optional<Element> sink;
  std::optional<FusedRotary> rotary;
  bool dropout = false;
  CacheFeatures cache;
};

// What may differ between two calls that the choice depends on.
struct FlashFwdProblem {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  bool aligned;  // every row of k and v is aligned to its loads, see kv_load_bytes
  FlashFwdFeatures features;
};

struct FlashFwdSpecialisation {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  int v_slice;        // columns of v and out that one threadgroup owns
  int row_fragments;  // 8-row fragments of queries a SIMD group owns
  int block_k;        // keys staged at a time
  int simdgroups;     // per threadgroup
  bool q_in_registers;
  bool wide_loads;   // as many columns of k and v at a time as make 16 bytes
  bool wide_rotary;  // and of k while it is rotated
  FlashFwdFeatures features;

  int block_q() const { return 8 * row_fragments * simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int v_slices() const { return (head_dim_v + v_slice - 1) / v_slice; }
  int registers() const;          // an estimate: 32-bit registers of a thread that hold tiles
  int threadgroup_bytes() const;  // exact: the shader's static K and V tiles
};

FlashFwdSpecialisation choose_flash_fwd(const FlashFwdProblem& problem);

Defines flash_fwd_defines(const FlashFwdSpecialisation& specialisation);

// Decoding: a threadgroup owns the query heads of one KV head and a part of the keys.
struct FlashDecodeSpecialisation {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  int row_fragments;      // 8-row fragments of queries that are worked on at a time
  int key_fragments;      // 8-key fragments of a SIMD group's block
  int key_simdgroups;     // per threadgroup, with different keys
  int column_simdgroups;  // with the same keys and different columns
  bool wide_loads;
  bool v_in_k;  // v is the first columns of k
  FlashFwdFeatures features;

  int rows() const { return 8 * row_fragments; }
  int step_keys() const { return 8 * key_fragments * key_simdgroups; }
  int threads() const { return 32 * key_simdgroups * column_simdgroups; }
  int registers() const;
  int threadgroup_bytes() const;
};

// `rows`: queries of all heads that share a KV head.
FlashDecodeSpecialisation choose_flash_decode(const FlashFwdProblem& problem, int64_t rows,
                                              bool v_in_k);

// Into how many parts the keys are split. `groups`: KV heads of all sequences; `keys`: that one
// sequence reads, at most; `cores`: of the GPU. At least 1, and none of them is empty at `keys`.
int64_t flash_decode_splits(const FlashDecodeSpecialisation& specialisation, int64_t groups,
                            int64_t rows, int64_t keys, int cores);

Defines flash_decode_defines(const FlashDecodeSpecialisation& specialisation, bool split);

std::string describe_choice(const FlashDecodeSpecialisation& specialisation, int64_t rows,
                            int64_t splits);

// A gradient kernel: a threadgroup owns rows of one side (queries for dq, keys for dk and dv) and
// walks over blocks of the other.
struct FlashBwdSpecialisation {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  int slices;         // over the grid, of the gradients' columns
  int row_fragments;  // 8-row fragments that a SIMD group owns
  int block;          // rows of the other side staged at a time
  int simdgroups;
  bool rows_in_registers;
  bool wide_loads;
  bool wide_rotary;
  bool dkv;          // the kernel of dk and dv, or that of dq
  bool exact_delta;  // see flash_bwd_dq.metal
  FlashFwdFeatures features;

  int block_rows() const { return 8 * row_fragments * simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int qk_slice() const;  // columns of dq, or of dk, that a threadgroup owns
  int v_slice() const;   // columns of dv
  // In float32 the rounding of the log-sum-exp shows in the weights.
  bool normalised() const { return exact_delta && element == Element::kFloat; }
  int registers() const;
  int threadgroup_bytes() const;
};

// Nothing if no tile fits in threadgroup memory.
std::optional<FlashBwdSpecialisation> choose_flash_bwd_dq(const FlashFwdProblem& problem,
                                                          bool exact_delta);
std::optional<FlashBwdSpecialisation> choose_flash_bwd_dkv(const FlashFwdProblem& problem,
                                                           bool exact_delta);

Defines flash_bwd_defines(const FlashBwdSpecialisation& specialisation);

// The kernel of what is added to scores: a threadgroup owns a tile of the bias in registers, and
// walks over the tiles of scores that share it.
struct FlashBwdBiasSpecialisation {
  Element element;
  int head_dim_qk;
  int head_dim_v;
  int row_fragments;  // 8-row fragments of queries that a SIMD group owns
  int block_k;        // keys of a tile
  int simdgroups;
  bool rows_in_registers;
  bool wide_loads;
  bool wide_rotary;
  FlashFwdFeatures features;

  int block_q() const { return 8 * row_fragments * simdgroups; }
  int threads() const { return 32 * simdgroups; }
  int registers() const;
  int threadgroup_bytes() const;
};

// Nothing if no tile fits in threadgroup memory.
std::optional<FlashBwdBiasSpecialisation> choose_flash_bwd_bias(const FlashFwdProblem& problem);

Defines flash_bwd_bias_defines(const FlashBwdBiasSpecialisation& specialisation);

// Into how many parts the walk over `shared` tiles of scores is split, of each of `owned` tiles of
// the bias. At least 1, and at most `shared` unless that is 0.
int64_t flash_bwd_bias_splits(int64_t owned, int64_t shared);

// The choice and its reasons in one sentence or two, for `explain`.
std::string describe_choice(const FlashFwdSpecialisation& specialisation);

}  // namespace metal_attn
