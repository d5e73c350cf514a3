// The tables that rope reads: cos and sin of each position times each inverse frequency.
#include "params/rope.h"

// The host defines TABLE_ELEMENT and POSITION_ELEMENT.

// The product is rounded to float32 before cos and sin, as when models are trained.
[[kernel, max_total_threads_per_threadgroup(ROPE_THREADS)]] void rope_tables(
    const device float* inv_freq [[buffer(ROPE_TABLES_INV_FREQ)]],
    const device POSITION_ELEMENT* positions [[buffer(ROPE_TABLES_POSITIONS)]],
    device TABLE_ELEMENT* cos_table [[buffer(ROPE_TABLES_COS)]],
    device TABLE_ELEMENT* sin_table [[buffer(ROPE_TABLES_SIN)]],
    constant RopeTablesParams& params [[buffer(ROPE_TABLES_PARAMS)]],
    uint3 position [[thread_position_in_grid]]) {
  const int column = position.x;
  const int token = position.y;
  const uint batches = params.batch;
  const int64_t section = position.z / batches;
  const int64_t batch = position.z % batches;
  if (column >= params.columns || token >= params.length || section >= params.sections) { return; }
  const float token_position =
      float(positions[section * params.section_stride + batch * params.batch_stride +
                      token * params.token_stride]);
  const float angle = token_position * inv_freq[column * params.inv_freq_stride];
  const int64_t element = (int64_t(position.z) * params.length + token) * params.columns + column;
  cos_table[element] = TABLE_ELEMENT(precise::cos(angle) * params.attention_factor);
  sin_table[element] = TABLE_ELEMENT(precise::sin(angle) * params.attention_factor);
}
