#include "csrc/ops/rope/fill.h"

#include <cstdint>

#include "shaders/params.h"

namespace metal_attn {

using torch::stable::Tensor;

namespace {

ColumnStrides column_strides(const Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)};
}

RotaryStrides table_strides(const Tensor& table) {
  const int64_t rank = table.dim();
  const bool batched = rank == 3 && table.size(0) > 1;
  return {batched ? table.stride(0) : 0, table.stride(rank - 2), table.stride(rank - 1)};
}

}  // namespace

Launch rope_launch(const RopeArguments& a, const RopeProblem& p, const RopeSpecialisation& s,
                   const Tensor& q_out, const Tensor& k_out) {
  // A slot whose tensor is missing or has no memory holds another one, and no thread reads it.
  const bool only_k = p.q_heads == 0;
  const bool only_q = p.heads == p.q_heads;
  const Tensor& q = only_k ? *a.k : a.q;
  const Tensor& k = only_q ? a.q : *a.k;
  const Tensor& q_result = only_k ? k_out : q_out;
  const Tensor& k_result = only_q ? q_out : k_out;
  const bool has_table = p.pairs > 0 && p.table_rows > 0;
  RopeParams params{};
  params.q_strides = column_strides(q);
  params.k_strides = column_strides(k);
  params.q_out_strides = column_strides(q_result);
  params.k_out_strides = column_strides(k_result);
  params.cos_strides = table_strides(a.cos);
  params.sin_strides = table_strides(a.sin);
  params.seqlen_offset = a.seqlen_offset;
  params.table_rows = p.table_rows;
  params.batch = p.batch;
  params.q_heads = p.q_heads;
  params.heads = p.heads;
  params.head_groups = s.shares.groups;
  params.length = p.length;
  params.head_dim = p.head_dim;
  params.pairs = p.pairs;
  params.pair_units = s.pair_units;
  params.units = s.units;
  params.sine_sign = a.conjugate ? -1.0f : 1.0f;

  Launch launch;
  launch.program.family = "rope";
  launch.kernel = "rope";
  launch.program.defines = rope_defines(p, s);
  launch.buffers = {{ROPE_Q, q, p.in_place},
                    {ROPE_K, k, p.in_place},
                    {ROPE_COS, has_table ? a.cos : q, false},
                    {ROPE_SIN, has_table ? a.sin : q, false}};
  if (!p.in_place) {
    launch.buffers.push_back({ROPE_Q_OUT, q_result, true});
    launch.buffers.push_back({ROPE_K_OUT, k_result, true});
  }
  if (a.positions.has_value()) {
    const Tensor& positions = *a.positions;
    const int64_t rank = positions.dim();
    params.rows_batch_stride = rank == 2 && positions.size(0) > 1 ? positions.stride(0) : 0;
    params.rows_token_stride = positions.stride(rank - 1);
    launch.buffers.push_back({ROPE_ROWS, positions, false});
  } else if (a.seqlen_offsets.has_value()) {
    params.rows_batch_stride = a.seqlen_offsets->stride(0);
    launch.buffers.push_back({ROPE_ROWS, *a.seqlen_offsets, false});
  }
  launch.params_slot = ROPE_PARAMS;
  launch.params.set(params);
  launch.threadgroups = s.grid.threadgroups;
  launch.threads = s.grid.threads;
  return launch;
}

Launch rope_tables_launch(const RopeTablesArguments& a, const RopeTablesProblem& p,
                          const Grid& grid, const Tensor& cos, const Tensor& sin) {
  const int64_t rank = a.positions.dim();
  RopeTablesParams params{};
  params.section_stride = rank > 2 ? a.positions.stride(rank - 3) : 0;
  params.batch_stride = rank > 1 ? a.positions.stride(rank - 2) : 0;
  params.token_stride = a.positions.stride(rank - 1);
  params.inv_freq_stride = a.inv_freq.stride(0);
  params.sections = static_cast<int32_t>(p.sizes[0]);
  params.batch = static_cast<int32_t>(p.sizes[1]);
  params.length = static_cast<int32_t>(p.sizes[2]);
  params.columns = p.columns;
  params.attention_factor = static_cast<float>(a.attention_factor);

  Launch launch;
  launch.program.family = "rope_tables";
  launch.kernel = "rope_tables";
  launch.program.defines = rope_tables_defines(p);
  launch.buffers = {{ROPE_TABLES_INV_FREQ, a.inv_freq, false},
                    {ROPE_TABLES_POSITIONS, a.positions, false},
                    {ROPE_TABLES_COS, cos, true},
                    {ROPE_TABLES_SIN, sin, true}};
  launch.params_slot = ROPE_TABLES_PARAMS;
  launch.params.set(params);
  launch.threadgroups = grid.threadgroups;
  launch.threads = grid.threads;
  return launch;
}

}  // namespace metal_attn
