// The work of one threadgroup of flash_decode: the rows of q of a KV head, a split of the head's
// keys, and where results are stored. Trees, new keys and invalid lengths are handled first.
#pragma once

#include "cache_write.h"
#include "decode_tile.h"

// A threadgroup's rows of q: a tile at `begin`, and another tile after every `step` rows.
struct RowShare {
  int begin;
  int step;
  int end;   // one past the last row; with INDICES, past the last row that has this list
  int list;  // INDICES

  METAL_FUNC void reset(int row_group, int rows, constant FlashDecodeParams& params) thread {
    list = INDICES ? row_group / params.list_groups : 0;
    const int first = INDICES ? list * params.list_rows : 0;
    const int list_group = INDICES ? row_group % params.list_groups : row_group;
    begin = first + list_group * ROWS * ROW_SIMDGROUPS;
    step = (INDICES ? params.list_groups : params.row_groups) * ROWS * ROW_SIMDGROUPS;
    end = INDICES ? min(first + params.list_rows, rows) : rows;
  }
};

struct DecodeTask {
  int batch;
  int kv_head;
  int split;
  int splits;
  int row_group;
  int rows;  // (query, head) pairs of the KV head
  RowShare share;
  Sequence sequence;
  Visibility visible;
  TokenTree tree;        // TREE
  int old_length;        // the number of keys before the new keys (APPEND)
  int64_t first_rotary;  // the table's row of the first query (APPEND, Q_ROTARY)

  METAL_FUNC void reset(thread const FlashInputs& inputs, uint3 position, uint3 grid,
                        constant FlashDecodeParams& params) thread {
    split = position.x;
    splits = grid.x;
    kv_head = int(position.y) / params.row_groups;
    row_group = int(position.y) % params.row_groups;
    batch = position.z;
    sequence = inputs.sequence(batch, params.problem);
    rows = sequence.q_length * params.problem.queries_per_kv;
    share.reset(row_group, rows, params);
    visible.reset(sequence, params.problem);
    old_length = 0;
    first_rotary = 0;
  }

  // True if lengths, trees or tables, which the host cannot check, are invalid.
  METAL_FUNC bool is_impossible(constant FlashParams& problem) const thread {
    // Instead of a missing page the first page is read, so it must exist.
    const bool no_page = PAGED && problem.cache_size == 0 && sequence.kv_length > 0;
    return (TREE || PACKED_Q || SEQUSED_K || LEFTPAD_K || CACHE_BATCH_IDX || PAGED) &&
           (sequence.impossible || no_page);
  }

  // The keys that any row of the task sees; with INDICES, any row that has the task's list.
  METAL_FUNC Range seen_keys(constant FlashParams& problem) const thread {
    const int first_query = INDICES ? share.begin / problem.queries_per_kv : 0;
    const int last_query =
        INDICES ? (share.end - 1) / problem.queries_per_kv : sequence.q_length - 1;
    return {visible.keys_of(first_query).begin, visible.keys_of(last_query).end};
  }

  // The split's share of `keys`, in whole steps. The last split has all new keys, and writes them.
  METAL_FUNC Range keys_of_split(Range keys) const thread {
    const int shared_steps = APPEND ? max(old_length - keys.begin, 0) / STEP_K
                                    : (max(keys.end - keys.begin, 0) + STEP_K - 1) / STEP_K;
    const int split_steps = (shared_steps + splits - 1) / splits;
    const int shared_end = keys.begin + min((split + 1) * split_steps, shared_steps) * STEP_K;
    return {keys.begin + min(split * split_steps, shared_steps) * STEP_K,
            split == splits - 1 ? keys.end : min(keys.end, shared_end)};
  }

  // TREE: stores the new tokens in `tokens`. For windows and chunks, a token's position is its
  // depth. All threads call it, in uniform control flow.
  METAL_FUNC void load_tree(thread const FlashInputs& inputs, threadgroup uint4* tokens,
                            int thread_index, constant FlashDecodeParams& params) thread {
    if (!TREE) { return; }
    const int64_t first = batch * params.tree_batch_stride;
    TreeInput input;
    input.parents = inputs.parents + (TREE_PARENTS ? first + sequence.q_start : 0);
    input.row_stride = params.tree_row_stride;
    input.rows = inputs.tree_mask + (TREE_MASK ? first + sequence.q_start * input.row_stride : 0);
    input.count = min(sequence.q_length, params.problem.q_length);
    tree.tokens = tokens;
    tree.count = input.count;
    for (int i = thread_index; i < tree.count; i += THREADS) {
      TreeToken token = input.token(i);
      token.begin = visible.keys_of(max(token.depth, 0)).begin;
      token.seen.drop_first(token.begin - (visible.existing.end - tree.count));
      tokens[i] = token.words();
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sequence.impossible =
        sequence.impossible || sequence.kv_length - sequence.q_length < sequence.first_key;
  }

  // APPEND: the last split writes the new keys, and the other splits read only old keys.
  METAL_FUNC void append(thread const FlashInputs& inputs, int thread_index,
                         constant FlashDecodeParams& params) thread {
    if (!APPEND) { return; }
    old_length = inputs.seqused_k[batch];
    if (split == splits - 1) {
      write_new_rows(inputs, thread_index, params.problem, params.append);
      threadgroup_barrier(mem_flags::mem_device);
    }
    if (Q_ROTARY) {
      first_rotary =
          int64_t(old_length) - (params.append.rotary_from_leftpad != 0 ? sequence.first_key : 0);
      const int rotary_rows =
          params.rotate_q_by_token != 0 ? sequence.q_length : min(sequence.q_length, 1);
      sequence.impossible = sequence.impossible || first_rotary < 0 ||
                            first_rotary + rotary_rows > params.append.table_rows;
    }
  }

  METAL_FUNC void write_new_rows(thread const FlashInputs& inputs, int thread_index,
                                 constant FlashParams& problem,
                                 constant AppendParams& params) const thread {
    const Range added = inputs.new_rows(batch, problem);
    AppendBuffers buffers;
    buffers.k = inputs.new_k + added.begin * params.k_strides.row;
    buffers.v = inputs.new_v + added.begin * params.v_strides.row;
    WHEN(APPEND, buffers.k_cache = inputs.k; buffers.v_cache = inputs.v;
         buffers.k_scale = inputs.k_scale; buffers.v_scale = inputs.v_scale;)
    buffers.cos_table = inputs.q_cos;
    buffers.sin_table = inputs.q_sin;
    AppendPlace place;
    place.tree = tree;
    place.first = old_length;
    place.first_rotary = old_length;
    if (LEFTPAD_K) {
      place.first_rotary -= params.rotary_from_leftpad != 0 ? inputs.leftpad_k[batch] : 0;
    }
    if (PAGED) { place.block_table = inputs.block_table + batch * params.block_table_stride; }
    place.cache_batch = CACHE_BATCH_IDX ? inputs.cache_batch_idx[batch] : batch;
    append_rows(buffers, place, batch, kv_head, 0, added.end - added.begin, thread_index, THREADS,
                params);
  }
};

// The keys that a threadgroup visits. All rows of a threadgroup have the same list of blocks.
struct DecodeKv {
  Keys keys;
  Values values;
  Blocks<listed_rows(FRAGMENT, FLEX_KV_BLOCK)> blocks;
  Range places;  // the split's places in the blocks
  Sequence sequence;
  DecodeLane lane;
  threadgroup LoadedPair* loaded_pairs;

  METAL_FUNC void reset(thread const FlashInputs& inputs, thread const DecodeTask& task,
                        thread const DecodeMemory& memory, thread const DecodeLane& decode_lane,
                        constant FlashParams& problem) thread {
    const int list = task.share.list;
    blocks.reset(inputs, problem.flex, task.batch,
                 INDICES ? task.kv_head : task.kv_head * problem.queries_per_kv,
                 PACKED_Q ? task.sequence.q_start + min(list, task.sequence.q_length) : list,
                 task.seen_keys(problem));
    places = task.keys_of_split(blocks.places());
    keys = inputs.keys(task.batch, task.kv_head, task.sequence, problem);
    values = inputs.values(task.batch, task.kv_head, task.sequence, problem);
    sequence = task.sequence;
    lane = decode_lane;
    loaded_pairs = memory.loaded_pairs;
  }

  // `row` if it exists, and otherwise some row that exists.
  METAL_FUNC int readable_row(int row) const thread {
    return min(INDICES ? max(row, 0) : row, sequence.kv_length - 1);
  }

  METAL_FUNC bool is_valid(int row) const thread {
    return row >= sequence.first_key && row < sequence.kv_length;
  }

  // The first column of the lane's unit in the SIMD group's s-th span of k or v.
  METAL_FUNC int column(short s) const thread {
    return lane.span(s) * SPAN_COLUMNS + lane.unit_column;
  }

  // The lane's unit of key fragment j and the SIMD group's s-th span in `loaded_pairs`, which has
  // k, [COLUMN_SIMDGROUPS, KEY_FRAGMENTS, OWN_QK_SPANS, UNIT_PAIRS], and then v with OWN_V_SPANS.
  METAL_FUNC threadgroup LoadedPair* key_unit(short j, short s) const thread {
    return loaded_pairs + ((lane.first_span * KEY_FRAGMENTS + j) * OWN_QK_SPANS + s) * UNIT_PAIRS +
           lane.index;
  }

  METAL_FUNC threadgroup LoadedPair* value_unit(short j, short s) const thread {
    return loaded_pairs + KEY_PAIRS +
           ((lane.first_span * KEY_FRAGMENTS + j) * OWN_V_SPANS + s) * UNIT_PAIRS + lane.index;
  }

  // The place of the span's scale, which follows the lane's unit.
  METAL_FUNC static threadgroup float* scale_of(threadgroup LoadedPair* unit) {
    return reinterpret_cast<threadgroup float*>(unit + SPAN_FRAGMENTS * SIMD_LANES);
  }
};

// The destination of the results of one split.
struct SplitResult {
  device Result* out;
  device float* lse;
  int batch;
  int first;  // the sequence's first row (PACKED_Q)

  METAL_FUNC void reset(device Result* all, device float* all_lse, int split,
                        thread const DecodeTask& task, constant FlashDecodeParams& params) thread {
    batch = task.batch;
    first = task.sequence.q_start;
    out = all + split * params.out_split_stride;
    lse = all_lse + batch * params.lse_strides.batch + first * params.lse_strides.row + split;
  }

  METAL_FUNC void place(thread OutRow& row, int head,
                        constant FlashDecodeParams& params) const thread {
    row.reset(out, params.out_strides, batch, head, first, 0);
  }

  // value: the log-sum-exp, or with SPLIT the maximum of the scores. sum: of the weights.
  METAL_FUNC void store_lse(thread const TileRow& row, float value, float sum,
                            constant FlashDecodeParams& params) const thread {
    device float* of_row =
        lse + row.head * params.lse_strides.head + row.query * params.lse_strides.row;
    of_row[0] = value;
    if (SPLIT) { of_row[params.lse_sum_offset] = sum; }
  }

  // Fills all rows with 0 or NaN if the task is not computed. With SPLIT, merge_splits adds the
  // sink.
  METAL_FUNC void fill(float value, thread const DecodeTask& task, thread const FlashInputs& inputs,
                       int thread_index, constant FlashDecodeParams& params) const thread {
    for (int n = task.row_group * THREADS + thread_index; n < task.rows;
         n += params.row_groups * THREADS) {
      TileRow row;
      row.reset(n, task.rows, task.kv_head, params.problem);
      OutRow out_row;
      place(out_row, row.head, params);
      out_row.fill(value, row.query, row.query + 1, 1);
      float row_lse = SPLIT ? MASKED_ROW_MAX : isnan(value) ? value : -INFINITY;
      WHEN(SINK, if (!SPLIT && !isnan(value)) { row_lse = float(inputs.learnable_sink[row.head]); })
      store_lse(row, row_lse, value, params);
    }
  }
};

// True if a SIMD group's rows leave few registers for anything else.
constant constexpr bool MANY_ROWS = ROW_FRAGMENTS > 2;

// The rows of a tile, and where their results are stored. `reset` follows the loop over the keys,
// which saves 6 of M1's registers in the loop. The broadcasts keep the compiler from moving it up.
struct TileResult {
  SplitResult split;
  TileRow rows[ROW_FRAGMENTS];  // the lane's
  int first_row;
  int end;  // one past the threadgroup's last row
  int kv_head;

  METAL_FUNC void reset(device Result* out, device float* lse, thread const DecodeTask& task,
                        int tile_row, int lane_row, constant FlashDecodeParams& params) thread {
    first_row = tile_row;
    end = task.share.end;
    kv_head = task.kv_head;
    split.reset(out, lse, MANY_ROWS ? simd_broadcast(task.split, ushort(0)) : task.split, task,
                params);
    reset_rows(rows, MANY_ROWS ? simd_broadcast(tile_row, ushort(0)) : tile_row, lane_row,
               task.rows, kv_head, params.problem);
  }

  // True if the row exists and is the threadgroup's.
  METAL_FUNC bool has_row(int tile_row) const thread { return first_row + tile_row < end; }
};
