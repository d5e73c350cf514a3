// The queries and keys of one sequence of the batch.
#pragma once

#include "features.h"
#include "params/attention.h"

// Lengths are in the caller's memory. If they are invalid, the sequence is `impossible`. Nothing
// outside the tensors is ever read.
struct Sequence {
  int q_start;  // first row in the packed tensors; 0 in dense ones
  int kv_start;
  int q_length;
  int kv_length;  // one past the last key that exists
  int first_key;  // the first key that exists
  int kv_rows;    // rows of k and v that belong to the sequence, including unused rows
  bool impossible;

  METAL_FUNC void reset(constant FlashParams& params) thread {
    q_start = 0;
    kv_start = 0;
    q_length = params.q_length;
    kv_length = params.kv_length;
    first_key = 0;
    kv_rows = params.kv_length;
    impossible = false;
  }

  // Rows cu_seqlens_q[batch] up to cu_seqlens_q[batch + 1] of packed queries. The batch index after
  // the last sequence stands for the rows that belong to no sequence. These see no keys.
  METAL_FUNC void unpack_queries(const device int* cu_seqlens_q, int batch,
                                 constant FlashParams& params) thread {
    const bool no_sequence = batch == params.batch;
    const int begin = cu_seqlens_q[batch];
    const int end = no_sequence ? params.q_total : cu_seqlens_q[batch + 1];
    q_start = batch == 0 ? 0 : clamp(begin, 0, params.q_total);
    q_length = max(clamp(end, 0, params.q_total) - q_start, 0);
    kv_length = no_sequence ? 0 : kv_length;
    impossible = begin != q_start || end != q_start + q_length ||
                 (!no_sequence && q_length > params.q_length);
  }

  // Rows cu_seqlens_k[batch] up to cu_seqlens_k[batch + 1] of packed keys. In a cache, the
  // difference is the number of keys, and the first key is row 0.
  METAL_FUNC void unpack_keys(const device int* cu_seqlens_k, int batch,
                              constant FlashParams& params) thread {
    const bool no_sequence = batch == params.batch;
    int kv_begin = cu_seqlens_k[batch];
    int kv_end = no_sequence ? params.kv_total : cu_seqlens_k[batch + 1];
    if (PAGED || CACHE_BATCH_IDX) {
      const int64_t keys = no_sequence ? 0 : int64_t(kv_end) - kv_begin;
      kv_begin = 0;
      kv_end = int(min(max(keys, int64_t(-1)), int64_t(params.kv_total) + 1));
    }
    kv_start = batch == 0 ? 0 : clamp(kv_begin, 0, params.kv_total);
    kv_rows = max(clamp(kv_end, 0, params.kv_total) - kv_start, 0);
    kv_length = no_sequence ? 0 : kv_rows;
    impossible = impossible || kv_begin != kv_start || kv_end != kv_start + kv_rows ||
                 (!no_sequence && kv_length > params.kv_length);
  }

  // True if the sequence is not computed: lengths are invalid, or the rows belong to no sequence.
  METAL_FUNC bool is_left_out(int batch, constant FlashParams& params) const thread {
    return (PACKED_Q || SEQUSED_K || LEFTPAD_K || CACHE_BATCH_IDX) &&
           (impossible || batch == params.batch);
  }

  // Keys from `used` on do not exist.
  METAL_FUNC void end_keys(int used) thread {
    impossible = impossible || used < 0 || used > kv_length;
    kv_length = clamp(used, 0, kv_length);
  }

  // Keys before `padding` do not exist. keys: the largest valid padding.
  METAL_FUNC void begin_keys(int padding, int keys) thread {
    impossible = impossible || padding < 0 || padding > keys;
    first_key = clamp(padding, 0, kv_length);
  }
};
