// Every argument struct and buffer slot: the whole contract between host and shader.
// Included by the shaders and by csrc/, so it holds plain fixed-width fields only, widest first.
#pragma once

#ifdef __METAL_VERSION__
using namespace metal;
#else
#include <cstdint>
#endif

// Metal's limit for one threadgroup on every Apple GPU.
#define THREADGROUP_MEMORY_BYTES 32768
// Bytes that an array takes of it: the next one begins at a multiple of 16.
#define ARRAY_BYTES(BYTES) (((BYTES) + 15) / 16 * 16)

// New tokens of a tree, at most, and what a threadgroup keeps of them (tree.h).
#define TREE_TOKENS 64
#define TREE_BYTES (TREE_TOKENS * 16)

// Dot products of more columns are summed in two chains, which halves their rounding error.
#define CHAIN_COLUMNS 128

// Leading dimension of a threadgroup tile that is `columns` (a multiple of 8) wide: an odd multiple
// of 8, so that the 32 lanes of a fragment load touch 32 different banks.
constexpr int padded(int columns) { return columns | 8; }

// SIMD groups, 1, 2 or 4, that share rows and divide so many fragments of scores in each of them:
// as many as can. The others have other rows.
constexpr int query_parts(int query_fragments, int simdgroups) {
  return query_fragments % simdgroups == 0 ? simdgroups : query_fragments % 2 == 0 ? 2 : 1;
}

// Where the threadgroups of a piece of a launch stand in its grid (GRID_PIECE): x, y and z.
struct GridPiece {
  uint32_t first[3];
  uint32_t threadgroups[3];  // of the whole grid
};

// Element strides of one (batch, head, row, column) operand; the last dimension has stride 1.
struct RowStrides {
  int64_t batch;
  int64_t head;
  int64_t row;
};

// Element strides of a mask or bias that broadcasts to (batch, head, query, key): 0 where it does.
struct MaskStrides {
  int64_t batch;
  int64_t head;
  int64_t query;
  int64_t key;
};

// Element strides of a (batch, row, column) table; the last dimension has stride 1.
struct TableStrides {
  int64_t batch;
  int64_t row;
};

// [[buffer(i)]] slots of what every kernel of attention reads. From CU_SEQLENS_Q on, a slot is
// bound if its feature is on.
enum FlashBuffer {
  FLASH_Q = 0,
  FLASH_K = 1,
  FLASH_V = 2,
  FLASH_PARAMS = 3,
  FLASH_CU_SEQLENS_Q = 4,
  FLASH_CU_SEQLENS_K = 5,
  FLASH_SEQUSED_K = 6,
  FLASH_LEFTPAD_K = 7,
  FLASH_MASK = 8,
  FLASH_BIAS = 9,
  FLASH_ALIBI_SLOPES = 10,
  FLASH_SINK = 11,
  FLASH_Q_COS = 12,
  FLASH_Q_SIN = 13,
  FLASH_K_COS = 14,
  FLASH_K_SIN = 15,
  FLASH_BLOCK_TABLE = 25,
  FLASH_CACHE_BATCH_IDX = 26,
  FLASH_K_SCALE = 27,
  FLASH_V_SCALE = 28,
  FLASH_INDICES = 29,
  FLASH_RNG_STATE = 30,  // the last of the slots
};

// Slots of flash_fwd's results.
enum FlashFwdBuffer {
  FLASH_FWD_OUT = 16,
  FLASH_FWD_LSE = 17,
};

// Slots of flex attention, which has none of the features above: what score_mod and mask_mod index,
// from the first on, and the lists of a BlockMask. With MASK_BLOCKS the first two have its list.
enum FlexBuffer {
  FLEX_FIRST_CAPTURE = 4,
  FLEX_BLOCK_ORDER = 24,
  FLEX_BLOCK_COUNTS = 25,
  FLEX_BLOCK_INDICES = 26,
  FLEX_FULL_BLOCK_COUNTS = 27,
  FLEX_FULL_BLOCK_INDICES = 30,
};

// The most tensors that score_mod and mask_mod may index, and the most dimensions of them together.
#define FLEX_CAPTURES_MAX 12
#define FLEX_DIMENSIONS_MAX 24

// A window without a limit.
#define NO_WINDOW (-1)

// Values of KV_FORMAT and V_FORMAT: how the numbers of k and v are stored.
#define KV_Q8_0 1
#define KV_Q4_0 2
#define KV_FP8_E4M3 3
// Codes of so many bits; a group of so many columns shares a scale and a minimum.
#define KV_GROUPED(bits, group) ((bits) * 256 + (group))

constexpr bool kv_grouped(int format) { return format > KV_FP8_E4M3; }
constexpr int kv_bits(int format) {
  return kv_grouped(format) ? format / 256 : format == KV_Q4_0 ? 4 : 8;
}
// Columns that share a scale. fp8_e4m3 has one a head.
constexpr int kv_scale_columns(int format) { return kv_grouped(format) ? format % 256 : 32; }
// Numbers that they share: the scale, and of grouped formats the minimum.
constexpr int kv_scale_numbers(int format) { return kv_grouped(format) ? 2 : 1; }
// Whether the numbers are exact codes times the scale of a span: kernels may multiply the codes.
constexpr bool kv_span_scaled(int format) { return format == KV_Q8_0 || format == KV_Q4_0; }
// Whether scales are written with the rows.
constexpr bool kv_row_scales(int format) { return kv_span_scaled(format) || kv_grouped(format); }

// The blocks that a BlockMask lists for each (batch, head, row of blocks); `key` strides along a
// list.
struct BlockListParams {
  RowStrides count_strides;
  MaskStrides index_strides;
  int32_t longest;  // entries that a list has room for
};

// An entry of a list that mask_blocks has made: a block, and whether attn_mask hides any of it.
constexpr int mask_block_entry(int block, bool is_partial) {
  return 2 * block + (is_partial ? 1 : 0);
}
constexpr int mask_block_of(int entry) { return entry / 2; }
constexpr bool mask_block_is_partial(int entry) { return entry % 2 != 0; }

// What score_mod and mask_mod index, one tensor after the other, and a BlockMask's lists.
struct FlexParams {
  int64_t capture_strides[FLEX_DIMENSIONS_MAX];
  BlockListParams partial;  // or the list that mask_blocks has made (MASK_BLOCKS)
  BlockListParams full;
  int32_t capture_sizes[FLEX_DIMENSIONS_MAX];
  int32_t order_batches;  // of block_order: 1, or as many as there are (FLEX_ORDER)
  int32_t order_heads;
  int32_t existing_blocks;  // of keys (INDICES)
};

// The problem that forward and backward solve.
struct FlashParams {
  RowStrides q_strides;
  RowStrides k_strides;  // PAGE_SIZE: a batch is a page
  RowStrides v_strides;
  RowStrides k_scale_strides;
  RowStrides v_scale_strides;
  MaskStrides mask_strides;
  MaskStrides bias_strides;
  TableStrides q_cos_strides;
  TableStrides q_sin_strides;
  TableStrides k_cos_strides;
  TableStrides k_sin_strides;
  FlexParams flex;
  int64_t alibi_batch_stride;
  int64_t block_table_stride;
  int64_t q_offset;      // the key index at which query 0 stands, unless bottom_right
  int64_t window_left;   // keys before a query's position that it sees, or NO_WINDOW
  int64_t window_right;  // and keys after it
  int32_t batch;
  int32_t q_length;        // PACKED_Q: at most, of any sequence
  int32_t kv_length;       // VARLEN: at most, of any sequence
  int32_t q_total;         // rows of q in all sequences (PACKED_Q)
  int32_t kv_total;        // rows of k in all sequences (VARLEN), or of a cache's at most
  int32_t cache_size;      // pages of k (PAGE_SIZE), or its batch (CACHE_BATCH_IDX)
  int32_t new_keys;        // after those that seqused_k counts (APPEND); PACKED_NEW_K: of all
  int32_t queries_per_kv;  // query heads that share one KV head
  int32_t chunk;           // a query sees only keys of its own chunk (CHUNKED)
  int32_t bottom_right;    // the last query stands at the last key
  uint32_t last_dropped;   // the largest random word that drops a weight (DROPOUT)
  float softmax_scale;
  float scale_log2;      // softmax_scale * log2(e) (without SOFTCAP)
  float scale_over_cap;  // softmax_scale / softcap (SOFTCAP)
  float cap_log2;        // softcap * log2(e) (SOFTCAP)
  float keep_scale;      // 1 / (1 - dropout_p), or 0 where that is infinite (DROPOUT)
};

struct FlashFwdParams {
  FlashParams problem;
  RowStrides out_strides;
  RowStrides lse_strides;
};

// Slots of the backward's own buffers; each kernel binds those that it names.
enum FlashBwdBuffer {
  FLASH_BWD_OUT = 16,
  FLASH_BWD_LSE = 17,
  FLASH_BWD_DOUT = 18,
  FLASH_BWD_DLSE = 19,
  FLASH_BWD_DELTA = 20,
  FLASH_BWD_DQ = 21,
  FLASH_BWD_DK = 22,
  FLASH_BWD_DV = 23,
  FLASH_BWD_DBIAS = 24,
  FLASH_BWD_NORMALISERS = 28,
  FLASH_BWD_EXACT_DELTA = 29,
};

struct FlashBwdParams {
  FlashParams problem;
  RowStrides out_strides;
  RowStrides dout_strides;
  RowStrides dq_strides;
  RowStrides dk_strides;
  RowStrides dv_strides;
  RowStrides lse_strides;  // and delta's
  RowStrides dlse_strides;
  int64_t dk_split_stride;  // between parts of dk (HEAD_SPLITS)
  int64_t dv_split_stride;
};

// [[buffer(i)]] slots of mask_blocks.
enum MaskBlocksBuffer {
  MASK_BLOCKS_MASK = 0,
  MASK_BLOCKS_COUNTS = 1,
  MASK_BLOCKS_ENTRIES = 2,
  MASK_BLOCKS_PARAMS = 3,
};

// SIMD groups of a threadgroup of mask_blocks.
#define MASK_BLOCKS_SIMDGROUPS 8

// Strides of 0 broadcast. Neighbours along `inner` are read together if they are neighbours in
// memory. Lists go along one of inner and outer, and there is one for each block of the other.
struct MaskBlocksParams {
  int64_t batch_stride;
  int64_t head_stride;
  int64_t outer_stride;
  int64_t inner_stride;
  int32_t outer_length;
  int32_t inner_length;
  int32_t outer_block;
  int32_t inner_block;
  int32_t along_inner;
  int32_t blocks;  // that a list has room for
};

// Slots of flash_bwd_sum.
enum FlashBwdSumBuffer {
  FLASH_BWD_SUM_PARTS = 0,
  FLASH_BWD_SUM_RESULT = 1,
};

struct FlashBwdSumParams {
  RowStrides part_strides;
  RowStrides sum_strides;
  int64_t split_stride;  // between parts
  int32_t splits;
  int32_t rows;  // of a head and batch
};

// The gradient of a bias, or of what is broadcast like one. A dimension is shared if all its
// positions have one element.
struct FlashBwdBiasParams {
  FlashParams problem;
  RowStrides dout_strides;
  RowStrides lse_strides;  // and delta's
  MaskStrides dbias_strides;
  int64_t split_stride;  // between the results of two parts of the walk
  int64_t split_tiles;   // of scores, that one part walks over
  int64_t shared_tiles;  // that share one tile of the bias
  int32_t splits;
  int32_t heads;      // of q
  int32_t own_heads;  // 1 if all heads share
  int32_t batches_shared;
  int32_t heads_shared;
};

// The gradient of what score_mod loads from a captured tensor. Tiles of queries are counted through
// (batch, head, tile), the last of these fastest; along those that are owned, elements differ.
struct FlashBwdCaptureParams {
  FlashParams problem;
  RowStrides dout_strides;
  RowStrides lse_strides;  // and delta's
  int64_t elements;        // of the captured tensor
  int64_t split_tiles;     // that a threadgroup walks over
  int64_t shared_tiles;    // of those that are not owned
  int32_t heads;           // of q
  int32_t q_tiles;
  int32_t batches_owned;
  int32_t heads_owned;
};

// Element strides of one (batch, head, row, column) operand, all of them any.
struct ColumnStrides {
  int64_t batch;
  int64_t head;
  int64_t row;
  int64_t column;
};

// Element strides of one (batch, row, column) table, all of them any.
struct RotaryStrides {
  int64_t batch;
  int64_t row;
  int64_t column;
};

// [[buffer(i)]] slots of rope. In place there are no outputs.
enum RopeBuffer {
  ROPE_Q = 0,
  ROPE_K = 1,
  ROPE_Q_OUT = 2,
  ROPE_K_OUT = 3,
  ROPE_COS = 4,
  ROPE_SIN = 5,
  ROPE_ROWS = 6,  // positions or seqlen_offsets, or nothing
  ROPE_PARAMS = 7,
};

// The most threads of a threadgroup of rope and rope_tables.
#define ROPE_THREADS 256

struct RopeParams {
  ColumnStrides q_strides;
  ColumnStrides k_strides;
  ColumnStrides q_out_strides;
  ColumnStrides k_out_strides;
  RotaryStrides cos_strides;
  RotaryStrides sin_strides;
  int64_t rows_batch_stride;
  int64_t rows_token_stride;  // read if ROWS_ARE_POSITIONS
  int64_t seqlen_offset;      // read unless ROWS_ARE_POSITIONS
  int32_t table_rows;
  int32_t batch;
  int32_t q_heads;
  int32_t heads;  // of q and k together
  int32_t head_groups;
  int32_t length;
  int32_t head_dim;
  int32_t pairs;       // columns of cos and sin
  int32_t pair_units;  // threads of a row that rotate its pairs
  int32_t units;       // those and the threads that copy the other columns
  float sine_sign;     // -1 rotates back
};

// [[buffer(i)]] slots of rope_tables.
enum RopeTablesBuffer {
  ROPE_TABLES_INV_FREQ = 0,
  ROPE_TABLES_POSITIONS = 1,
  ROPE_TABLES_COS = 2,
  ROPE_TABLES_SIN = 3,
  ROPE_TABLES_PARAMS = 4,
};

struct RopeTablesParams {
  int64_t section_stride;  // of positions (section, batch, token)
  int64_t batch_stride;
  int64_t token_stride;
  int64_t inv_freq_stride;
  int32_t sections;
  int32_t batch;
  int32_t length;
  int32_t columns;
  float attention_factor;
};

// New rows of k and v, and the cache they are written into. A page is a batch of the cache. Scales
// of q8_0 and q4_0 have its strides, those of fp8_e4m3 a batch and a head.
struct AppendParams {
  RowStrides k_strides;
  RowStrides v_strides;
  RowStrides k_cache_strides;
  RowStrides v_cache_strides;
  RowStrides k_scale_strides;
  RowStrides v_scale_strides;
  TableStrides cos_strides;
  TableStrides sin_strides;
  int64_t block_table_stride;
  int32_t length;               // new rows of each sequence, or of all (PACKED_NEW_K)
  int32_t capacity;             // rows that a sequence may have
  int32_t cache_size;           // batches or pages of the cache
  int32_t table_rows;           // of cos and sin
  int32_t rotary_from_leftpad;  // rows of cos and sin count from leftpad_k (LEFTPAD_K)
};

// Slots of flash_decode's own buffers: results, with splits each split's, and what is appended.
enum FlashDecodeBuffer {
  FLASH_DECODE_OUT = 16,
  FLASH_DECODE_LSE = 17,
  FLASH_DECODE_NEW_K = 18,
  FLASH_DECODE_NEW_V = 19,
  FLASH_DECODE_CU_SEQLENS_K_NEW = 20,
  FLASH_DECODE_PARENTS = 21,
  FLASH_DECODE_TREE_MASK = 22,
};

struct FlashDecodeParams {
  FlashParams problem;
  RowStrides out_strides;
  RowStrides lse_strides;
  int64_t out_split_stride;
  int64_t lse_split_stride;
  int64_t tree_batch_stride;  // TREE
  int64_t tree_row_stride;    // TREE_MASK
  int32_t row_groups;         // threadgroups among which the rows of a KV head are dealt out
  int32_t list_groups;        // of one list of keys; without lists, all of them
  int32_t list_rows;          // queries of a KV head's heads that have one list (INDICES)
  AppendParams append;        // APPEND
  int32_t rotate_q_by_token;  // query i is rotated by i rows more than query 0 (APPEND)
};

// [[buffer(i)]] slots of append_kv. From K_SCALE on, a slot is bound if its define is on.
enum AppendBuffer {
  APPEND_K = 0,
  APPEND_V = 1,
  APPEND_K_CACHE = 2,
  APPEND_V_CACHE = 3,
  APPEND_PARAMS = 4,
  APPEND_K_SCALE = 5,
  APPEND_V_SCALE = 6,
  APPEND_SEQLENS = 7,
  APPEND_BLOCK_TABLE = 8,
  APPEND_CACHE_BATCH_IDX = 9,
  APPEND_LEFTPAD_K = 10,
  APPEND_Q = 11,
  APPEND_COS = 12,
  APPEND_SIN = 13,
};

// The most threads of a threadgroup of append_kv.
#define APPEND_THREADS 256

struct AppendKvParams {
  AppendParams append;
  RopeParams q;
  int32_t kv_heads;
  int32_t block_rows;         // new rows of a threadgroup
  int32_t block_tokens;       // and of q
  int32_t rotate_q_by_token;  // token i of q is rotated by i rows more than token 0
};

// [[buffer(i)]] slots of index_scores.
enum IndexScoresBuffer {
  INDEX_SCORES_Q = 0,
  INDEX_SCORES_K = 1,
  INDEX_SCORES_WEIGHTS = 2,
  INDEX_SCORES_OUT = 3,
  INDEX_SCORES_PARAMS = 4,
};

// A row is a head, and a head of the strides a query.
struct IndexScoresParams {
  RowStrides q_strides;
  RowStrides k_strides;
  RowStrides weight_strides;
  int64_t q_offset;  // the key index at which query 0 stands (CAUSAL)
  int32_t heads;
  int32_t q_length;
  int32_t kv_length;
  float softmax_scale;
};

// Dimensions other than the softmax's axis, at most: each has two positions or more, and the rows
// are counted in 31 bits.
#define MAX_ROW_DIMS 31

// Where each row of a tensor begins: sizes and element strides of the dimensions that count rows,
// innermost first.
struct RowDims {
  int64_t strides[MAX_ROW_DIMS];
  uint32_t sizes[MAX_ROW_DIMS];
  int32_t count;
};

// [[buffer(i)]] slots of copy_pages.
enum CopyPagesBuffer {
  COPY_PAGES_CACHE = 0,
  COPY_PAGES_SRC = 1,
  COPY_PAGES_DST = 2,
  COPY_PAGES_PARAMS = 3,
};

// Threads of a threadgroup of copy_pages, and words that each copies.
#define COPY_PAGES_THREADS 256
#define COPY_PAGES_WORDS 4

// Strides and sizes count words: what is copied at a time.
struct CopyPagesParams {
  RowDims words;  // of a page
  int64_t page_stride;
  int64_t src_stride;
  int64_t dst_stride;
  int64_t pages;
  uint32_t page_words;
};

// [[buffer(i)]] slots of softmax. In place, X and OUT are one tensor.
enum SoftmaxBuffer {
  SOFTMAX_X = 0,
  SOFTMAX_OUT = 1,
  SOFTMAX_PARAMS = 2,
};

struct SoftmaxParams {
  RowDims x_rows;
  RowDims out_rows;
  int64_t x_stride;  // along the axis
  int64_t out_stride;
  uint32_t rows;
  uint32_t length;  // of the axis
};

// [[buffer(i)]] slots of apply_causal_mask.
enum CausalMaskBuffer {
  CAUSAL_MASK_SCORES = 0,
  CAUSAL_MASK_PARAMS = 1,
};

struct CausalMaskParams {
  RowDims score_rows;  // the innermost dimension is the query
  int64_t key_stride;
  int64_t q_offset;  // -inf where key > query + q_offset
  uint32_t rows;
  uint32_t q_length;
  uint32_t kv_length;
};

// [[buffer(i)]] slots of merge_state: two results of attention, and that over both's keys.
// In place out and lse hold state a, and OUT_A and LSE_A are not bound.
enum MergeStateBuffer {
  MERGE_STATE_OUT_A = 0,
  MERGE_STATE_LSE_A = 1,
  MERGE_STATE_OUT_B = 2,
  MERGE_STATE_LSE_B = 3,
  MERGE_STATE_OUT = 4,
  MERGE_STATE_LSE = 5,
  MERGE_STATE_PARAMS = 6,
  MERGE_STATE_MASK = 7,
};

// Rows are counted through (batch, head, row), the last of these fastest.
struct MergeShape {
  uint32_t rows;    // in all
  uint32_t heads;   // of a batch
  uint32_t length;  // rows of a head
  int32_t columns;
};

struct MergeStateParams {
  RowStrides out_a_strides;
  RowStrides lse_a_strides;
  RowStrides out_b_strides;
  RowStrides lse_b_strides;
  RowStrides out_strides;
  RowStrides lse_strides;
  RowStrides mask_strides;
  MergeShape shape;
};

// The most threads of a threadgroup of merge_state, one for each column of the widest rows.
#define MERGE_STATE_THREADS 512

// [[buffer(i)]] slots of merge_splits.
enum MergeSplitsBuffer {
  MERGE_SPLITS_PARTIAL_OUT = 0,
  MERGE_SPLITS_PARTIAL_LSE = 1,
  MERGE_SPLITS_SINK = 2,
  MERGE_SPLITS_OUT = 3,
  MERGE_SPLITS_LSE = 4,
  MERGE_SPLITS_PARAMS = 5,
};

struct MergeSplitsParams {
  RowStrides out_strides;
  RowStrides lse_strides;
  MergeShape shape;
  int32_t splits;
};

// SIMD groups of a threadgroup of merge_splits, and how many lanes of one share a split's row.
#define MERGE_SPLITS_SIMDGROUPS 4
#define MERGE_SPLITS_COLUMN_LANES 8

// The [[buffer(i)]] slot of probe.
enum ProbeBuffer {
  PROBE_VALUES = 0,
};

// What probe adds to: a product of matrices [8, 8], then a value for each lane.
#define PROBE_PRODUCTS 64
#define PROBE_LANES 32

// What probe_tensor writes: whether the language has tensor operations; how many slots a lane has
// of a left operand, a right one and a result; of each lane, for all its slots in this order,
// PROBE_TENSOR_ROW * row + column; and up to four products [16, 32].
#define PROBE_TENSOR_LANGUAGE 0
#define PROBE_TENSOR_CAPACITIES 1
#define PROBE_TENSOR_COORDINATES 4
#define PROBE_TENSOR_LANE_SLOTS 40
#define PROBE_TENSOR_ROW 64
#define PROBE_TENSOR_PRODUCTS 1284
#define PROBE_TENSOR_VALUES 3332

// Factors of these products and what they are added to: all numbers are exact, also if tensor
// operations cut float32 to 11 bits, of which wide factors have all.
constexpr int probe_tensor_wide(int i, int j) { return 1025 + (37 * i + 11 * j) % 1021; }
constexpr int probe_tensor_left(int row, int k, bool wide) {
  return wide ? probe_tensor_wide(row, k) : (112 * row + 7 * k) % 127 - 63;
}
constexpr int probe_tensor_right(int k, int column, bool wide) {
  return wide ? probe_tensor_wide(k, column) : (160 * k + 5 * column) % 61 - 30;
}
constexpr int probe_tensor_before(int row, int column) { return 40 * row - column; }
