// Attention forward on tensor tiles: flash_fwd.metal with Metal 4's tensor operations.
//
// A threadgroup owns BLOCK_Q queries of one head and walks over the keys, 32 at a time. Each SIMD
// group owns 16 queries. As in MLX and PyTorch, nothing is staged: the SIMD groups of a threadgroup
// read K and V from device memory, through the GPU's cache.
#define TENSOR_TILES 1

#include "forward.h"
#include "tensor_products.h"

// The host defines what flash_fwd needs. ELEMENT is float only if TF32 is allowed, and WIDE_LOADS
// holds for q, too.
static_assert(BLOCK_K == SPAN_COLUMNS, "a product gives scores of 32 keys");
static_assert(V_SLICE % SPAN_COLUMNS == 0, "a slice of V is a multiple of 32 columns");

// Has the interface of StagedKv. Each SIMD group reads K and V for itself.
struct TensorKv {
  using QueryTile = QueryRows<ELEMENT, Queries, HEAD_DIM_QK, Q_IN_REGISTERS>;
  using Scores = BlockTile;
  using Softmax = RowsSoftmax<TENSOR_ROWS, CutWeights>;
  using Out = RegisterTile<float, TENSOR_ROWS, V_FRAGMENTS>;
  static constant constexpr int OUT_FRAGMENTS = V_FRAGMENTS;
  Keys keys;
  Values values;
  Sequence sequence;
  int first_key;
  int first_value_column;
  ushort lane;

  METAL_FUNC void reset(threadgroup uint4*, threadgroup Fragment<float>*, Keys all_keys,
                        Values all_values, thread const Sequence& own_sequence, int slice, ushort,
                        ushort, ushort own_lane) thread {
    keys = all_keys;
    values = all_values;
    sequence = own_sequence;
    first_value_column = slice * V_SLICE;
    lane = own_lane;
  }

  METAL_FUNC int query_column() const thread { return 0; }
  METAL_FUNC int out_column(short d) const thread { return lane_column(lane) + column_offset(d); }

  METAL_FUNC void begin_block(int kv_block) thread {
    first_key = kv_block;
    move_to(keys, values, first_key, BLOCK_K, lane);
    // Keeps the SIMD groups at one block, so that rows are in the GPU's cache when the second SIMD
    // group reads them. It orders no memory.
    threadgroup_barrier(mem_flags::mem_none);
  }

  METAL_FUNC void multiply_keys(thread Scores& scores, thread const QueryTile& q,
                                bool) const thread {
    KeyPlaces<Keys> places;
    places.find(keys, first_key, sequence.first_key, sequence.kv_length, fragment_row(lane));
    multiply_transposed<KvTileElement, HEAD_DIM_QK>(scores, q, keys, places);
  }

  METAL_FUNC void accumulate_values(thread Out& o, thread const float* corrections,
                                    thread const Scores& weights) const thread {
    KeyPlaces<Values> places;
    places.find(values, first_key, sequence.first_key, sequence.kv_length, fragment_row(lane));
    accumulate<KvTileElement, HEAD_DIM_V, V_SLICE>(o, corrections, weights, values, places,
                                                   first_value_column, lane_column(lane));
  }
};

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void flash_fwd_tensor(
    FLASH_PARAMETERS device ELEMENT* out [[buffer(FLASH_FWD_OUT)]],
    device float* softmax_lse [[buffer(FLASH_FWD_LSE)]], GRID_PARAMS(FlashFwdParams, FLASH_PARAMS),
    GRID_POSITION_AND_SIZE, THREAD_INDICES) {
  SET_GRID_POSITION_AND_SIZE(FlashFwdParams)
  FlashInputs inputs;
  FLASH_SET_INPUTS
  attend<TensorKv, TENSOR_ROWS>(inputs, out, softmax_lse, params, nullptr, nullptr,
                                threadgroup_position, threadgroups, thread_index, simdgroup, lane);
}
