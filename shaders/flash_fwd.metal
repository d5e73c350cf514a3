// Attention forward: softmax(q k^T * scale) v, block by block over the keys.
//
// Dao et al., "FlashAttention" (2022), algorithm 1; Dao, "FlashAttention-2" (2023), algorithm 1.
//
// A threadgroup owns BLOCK_Q queries of one head and walks over the keys, BLOCK_K at a time. Each
// SIMD group owns ROW_FRAGMENTS x 8 queries, so that one K or V fragment serves that many matrix
// operations; scores and weights never leave its registers. The matrix unit multiplies half and
// bfloat16 fragments without conversion; weights stay float32.
//
// StagedKv stages blocks of K and V in threadgroup memory; without KV_STAGED, DirectKv reads them
// from device memory.
#include "forward.h"
#include "staged.h"
#include "unstaged.h"

// The host defines ELEMENT, HEAD_DIM_QK, HEAD_DIM_V, V_SLICE, ROW_FRAGMENTS, BLOCK_K, SIMDGROUPS
// and Q_IN_REGISTERS; COLUMN_SIMDGROUPS as 2 if two SIMD groups share rows; KV_STAGED as 0 without
// staging; the features that are on (features.h), with BIAS_ELEMENT, SINK_ELEMENT, ROTARY_ELEMENT,
// ROTARY_DIM, PAGE_SIZE, KV_ELEMENT, KV_FORMAT and V_FORMAT; or FLEX with FLEX_CAPTURES,
// FLEX_SCORE, FLEX_MASK, FLEX_Q_BLOCK and FLEX_KV_BLOCK.
constant constexpr int SCORE_PARTS = SIMDGROUPS * ROW_FRAGMENTS * KEY_FRAGMENTS * SIMD_LANES;

using KeysValues = conditional_t<KV_STAGED, StagedKv<ROW_FRAGMENTS, KEY_FRAGMENTS>,
                                 DirectKv<ROW_FRAGMENTS, KEY_FRAGMENTS>>;

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_fwd(
    FLASH_PARAMETERS device ELEMENT* out [[buffer(FLASH_FWD_OUT)]],
    device float* softmax_lse [[buffer(FLASH_FWD_LSE)]], GRID_PARAMS(FlashFwdParams, FLASH_PARAMS),
    GRID_POSITION_AND_SIZE, THREAD_INDICES) {
  SET_GRID_POSITION_AND_SIZE(FlashFwdParams)
  THREADGROUP_ARRAY(KV_STAGED, uint4, tiles, TILE_BYTES / sizeof(uint4))
  THREADGROUP_ARRAY(COLUMNS_SPLIT, Fragment<float>, score_parts, SCORE_PARTS)

  FlashInputs inputs;
  FLASH_SET_INPUTS
  attend<KeysValues, ROW_FRAGMENTS>(inputs, out, softmax_lse, params, tiles, score_parts,
                                    threadgroup_position, threadgroups, thread_index, simdgroup,
                                    lane);
}
