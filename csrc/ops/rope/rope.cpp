#include "csrc/ops/rope/rope.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/check.h"
#include "csrc/ops/common/json.h"
#include "csrc/ops/common/overlap.h"
#include "csrc/ops/rope/rotation.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Grid {
  std::array<uint32_t, 3> threadgroups;
  std::array<uint32_t, 3> threads;
};

struct Problem {
  Element element;
  Element table_element;
  const char* row_element;  // null: rows follow from the offset alone
  bool rows_are_positions;
  int vector;
  int32_t batch;
  int32_t q_heads;
  int32_t heads;
  HeadShares shares;
  int32_t length;
  int32_t head_dim;
  int32_t table_rows;
  int32_t pairs;
  int32_t pair_units;
  int32_t units;
  bool interleaved;
  bool in_place;
  Grid grid;

  bool launches() const { return batch > 0 && heads > 0 && length > 0 && units > 0; }
};

// `sizes` threads in threadgroups of up to ROPE_THREADS, filled from the first dimension on.
Grid checked_grid(const char* name, std::array<int64_t, 3> sizes) {
  Grid grid{};
  int64_t room = ROPE_THREADS;
  for (int i = 0; i < 3; ++i) {
    const int64_t threads = std::clamp<int64_t>(sizes[i], 1, room);
    const int64_t groups = divide_up(sizes[i], threads);
    room /= threads;
    check(groups * threads <= std::numeric_limits<uint32_t>::max(), name, " needs a grid of ",
          sizes[0], " x ", sizes[1], " x ", sizes[2],
          " threads, and Metal counts at most 2^32 - 1 in each dimension");
    grid.threadgroups[i] = static_cast<uint32_t>(groups);
    grid.threads[i] = static_cast<uint32_t>(threads);
  }
  return grid;
}

// (P, R / 2), (1, P, R / 2) or (B, P, R / 2).
void check_table(const char* name, const Tensor& table, int32_t batch, int32_t head_dim) {
  const int64_t rank = table.dim();
  check(rank == 2 || rank == 3, name, " has ", rank, " dimensions, shape ", shape_text(table),
        "; it must have 2 or 3: (positions, R / 2) or (batch, positions, R / 2)");
  check(rank == 2 || table.size(0) == 1 || table.size(0) == batch, name, " has a batch of ",
        table.size(0), " and q of ", batch, "; it must be 1 or equal");
  check(2 * table.size(rank - 1) <= head_dim, name, " has ", table.size(rank - 1),
        " columns and q a head dim of ", head_dim, "; they must be at most half of it");
  check_storage(name, table);
}

// Returns Metal's name of the dtype.
const char* check_row_index(const char* name, const Tensor& tensor, bool long_allowed) {
  const ScalarType dtype = tensor.scalar_type();
  check(dtype == ScalarType::Int || (long_allowed && dtype == ScalarType::Long), name,
        " has dtype ", dtype_text(tensor), "; it must be ",
        long_allowed ? "int32 or int64" : "int32");
  check_storage(name, tensor);
  return dtype == ScalarType::Int ? "int" : "long";
}

void check_rows(const RopeArguments& a, Problem& p) {
  if (a.positions.has_value()) {
    const Tensor& positions = *a.positions;
    check_device("positions", positions);
    check_same_device("positions", positions, "q", a.q);
    p.row_element = check_row_index("positions", positions, true);
    p.rows_are_positions = true;
    const int64_t rank = positions.dim();
    const bool fits =
        (rank == 1 || (rank == 2 && (positions.size(0) == 1 || positions.size(0) == p.batch))) &&
        positions.size(rank - 1) == p.length;
    check(fits, "positions has shape ", shape_text(positions), "; it must be (", p.length,
          ",), (1, ", p.length, ") or (", p.batch, ", ", p.length, ")");
    check(a.seqlen_offset == 0, "seqlen_offset is ", a.seqlen_offset,
          " and positions is given, which says everything: leave seqlen_offset 0");
    check(!a.seqlen_offsets.has_value(),
          "seqlen_offsets is given and so is positions, which says everything: give one of them");
    return;
  }
  if (a.seqlen_offsets.has_value()) {
    const Tensor& offsets = *a.seqlen_offsets;
    check_device("seqlen_offsets", offsets);
    check_same_device("seqlen_offsets", offsets, "q", a.q);
    p.row_element = check_row_index("seqlen_offsets", offsets, false);
    check(offsets.dim() == 1 && offsets.size(0) == p.batch, "seqlen_offsets has shape ",
          shape_text(offsets), "; it must be (", p.batch, ",)");
    check(a.seqlen_offset >= -kMaxLength && a.seqlen_offset <= kMaxLength, "seqlen_offset is ",
          a.seqlen_offset, "; it must be in -", kMaxLength, "..", kMaxLength);
    return;
  }
  const int64_t most = int64_t{p.table_rows} - p.length;
  check(p.length == 0 || (a.seqlen_offset >= 0 && a.seqlen_offset <= most), "seqlen_offset is ",
        a.seqlen_offset, " and q has a length of ", p.length, "; they must stay within the ",
        p.table_rows, " rows of cos");
}

// The outputs are dense, so a multiple of the vector in columns aligns them.
int choose_vector(const RopeArguments& a, const Problem& p) {
  int64_t vector = std::min(
      {int64_t{kMaxVector}, aligned_vector(a.q), aligned_vector(a.cos), aligned_vector(a.sin)});
  if (a.k.has_value()) {
    vector = std::min(vector, aligned_vector(*a.k));
  }
  while (vector > 1 && (p.pairs % vector != 0 || (!p.in_place && p.head_dim % vector != 0))) {
    vector /= 2;
  }
  return static_cast<int>(vector);
}

void check_in_place(const RopeArguments& a) {
  std::vector<std::pair<const char*, const Tensor*>> written{{"q", &a.q}};
  if (a.k.has_value()) {
    written.push_back({"k", &*a.k});
  }
  for (const auto& [name, tensor] : written) {
    check(!may_overlap_itself(*tensor), name, " has shape ", shape_text(*tensor), " and strides ",
          stride_text(*tensor),
          ": elements may share memory, so it cannot be turned in place; call ", name,
          ".clone() first, or rope");
  }
  if (a.k.has_value()) {
    check(!may_overlap(a.q, *a.k),
          "k may share elements with q, so they cannot be turned in place together; if they do "
          "not, call rope_ for each of them");
  }
  std::vector<std::pair<const char*, const Tensor*>> read{{"cos", &a.cos}, {"sin", &a.sin}};
  if (a.positions.has_value()) {
    read.push_back({"positions", &*a.positions});
  }
  if (a.seqlen_offsets.has_value()) {
    read.push_back({"seqlen_offsets", &*a.seqlen_offsets});
  }
  for (const auto& [name, tensor] : read) {
    for (const auto& [written_name, written_tensor] : written) {
      check(!spans_overlap(*tensor, *written_tensor), name, " lies in the memory of ", written_name,
            ", which is written in place; call ", name, ".clone() first");
    }
  }
}

void check_output_size(const char* name, const Tensor& tensor) {
  double bytes = static_cast<double>(tensor.element_size());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    bytes *= static_cast<double>(tensor.size(dim));
  }
  check(bytes < static_cast<double>(std::numeric_limits<int64_t>::max()), name, " has shape ",
        shape_text(tensor), "; the result would be over 2^63 bytes");
}

// Every check, then the choice of kernel.
Problem analyse(const RopeArguments& a, bool in_place) {
  Problem p{};
  p.in_place = in_place;
  p.interleaved = a.interleaved;
  const char* layout = "(batch, heads, length, head_dim)";
  check_device("q", a.q);
  p.element = check_element("q", a.q);
  check_rank("q", a.q, 4, layout);
  p.batch = check_length("q", a.q, 0, "batch");
  p.q_heads = check_length("q", a.q, 1, "number of heads");
  p.length = check_length("q", a.q, 2, "length");
  p.head_dim = check_length("q", a.q, 3, "head dim");
  check(p.head_dim > 0, "q has a head dim of 0; it must be at least 1");
  check_storage("q", a.q);
  int64_t heads = p.q_heads;
  if (a.k.has_value()) {
    const Tensor& k = *a.k;
    check_device("k", k);
    check_same_device("k", k, "q", a.q);
    check_same_dtype("k", k, "q", a.q);
    check_rank("k", k, 4, layout);
    check(k.size(0) == p.batch, "k has a batch of ", k.size(0), " and q of ", p.batch,
          "; they must be equal");
    check(k.size(2) == p.length, "k has a length of ", k.size(2), " and q of ", p.length,
          "; they must be equal");
    check(k.size(3) == p.head_dim, "k has a head dim of ", k.size(3), " and q of ", p.head_dim,
          "; they must be equal");
    heads += check_length("k", k, 1, "number of heads");
    check(heads <= kMaxLength, "q and k have ", heads, " heads together; it must be at most ",
          kMaxLength);
    check_storage("k", k);
  }
  p.heads = static_cast<int32_t>(heads);

  check_device("cos", a.cos);
  check_device("sin", a.sin);
  check_same_device("cos", a.cos, "q", a.q);
  check_same_device("sin", a.sin, "q", a.q);
  p.table_element = check_element("cos", a.cos);
  check_same_dtype("sin", a.sin, "cos", a.cos);
  check_table("cos", a.cos, p.batch, p.head_dim);
  check_storage("sin", a.sin);
  check(same_sizes(a.sin, a.cos.sizes()), "sin has shape ", shape_text(a.sin), " and cos ",
        shape_text(a.cos), "; they must be equal");
  p.table_rows = check_length("cos", a.cos, a.cos.dim() - 2, "number of rows");
  p.pairs = static_cast<int32_t>(a.cos.size(a.cos.dim() - 1));
  check_rows(a, p);
  if (in_place) {
    check_in_place(a);
  } else {
    check_output_size("q", a.q);
    if (a.k.has_value()) {
      check_output_size("k", *a.k);
    }
  }

  p.vector = choose_vector(a, p);
  p.pair_units = p.pairs / p.vector;
  p.units = p.pair_units;
  if (!in_place) {
    p.units += static_cast<int32_t>(divide_up(p.head_dim - 2 * p.pairs, 2 * p.vector));
  }
  p.shares = share_heads(static_cast<double>(p.batch) * p.length * p.units, p.heads);
  if (p.launches()) {
    p.grid = checked_grid("q", {p.units, p.length, int64_t{p.batch} * p.shares.groups});
  }
  return p;
}

Defines defines_of(const Problem& p) {
  return {
      {"ELEMENT", element_name(p.element)},
      {"TABLE_ELEMENT", element_name(p.table_element)},
      {"VECTOR", p.vector},
      {"HEADS", p.shares.heads},
      {"INTERLEAVED", p.interleaved},
      {"IN_PLACE", p.in_place},
      {"HAS_ROWS", p.row_element != nullptr},
      {"ROWS_ARE_POSITIONS", p.rows_are_positions},
      {"ROW_ELEMENT", p.row_element == nullptr ? "int" : p.row_element},
  };
}

ColumnStrides column_strides(const Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)};
}

RotaryStrides table_strides(const Tensor& table) {
  const int64_t rank = table.dim();
  const bool batched = rank == 3 && table.size(0) > 1;
  return {batched ? table.stride(0) : 0, table.stride(rank - 2), table.stride(rank - 1)};
}

Launch launch_of(const Problem& p, const RopeArguments& a, const Tensor& q_out,
                 const Tensor& k_out) {
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
  params.head_groups = p.shares.groups;
  params.length = p.length;
  params.head_dim = p.head_dim;
  params.pairs = p.pairs;
  params.pair_units = p.pair_units;
  params.units = p.units;
  params.sine_sign = a.conjugate ? -1.0f : 1.0f;

  Launch launch;
  launch.program.family = "rope";
  launch.kernel = "rope";
  launch.program.defines = defines_of(p);
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
  launch.threadgroups = p.grid.threadgroups;
  launch.threads = p.grid.threads;
  return launch;
}

struct TablesProblem {
  ScalarType dtype;
  Element element;
  const char* position_element;
  std::array<int64_t, 3> sizes;  // sections, batch, length
  int32_t columns;
  Grid grid;

  bool launches() const { return columns > 0 && sizes[0] > 0 && sizes[1] > 0 && sizes[2] > 0; }
};

TablesProblem analyse(const RopeTablesArguments& a) {
  TablesProblem p{};
  check_device("inv_freq", a.inv_freq);
  check(check_element("inv_freq", a.inv_freq) == Element::kFloat, "inv_freq has dtype ",
        dtype_text(a.inv_freq), "; it must be float32, which fewer digits than that would spoil");
  check_rank("inv_freq", a.inv_freq, 1, "(R / 2)");
  p.columns = check_length("inv_freq", a.inv_freq, 0, "length");
  check_storage("inv_freq", a.inv_freq);
  check_device("positions", a.positions);
  check_same_device("positions", a.positions, "inv_freq", a.inv_freq);
  switch (a.positions.scalar_type()) {
    case ScalarType::Int:
      p.position_element = "int";
      break;
    case ScalarType::Long:
      p.position_element = "long";
      break;
    case ScalarType::Float:
      p.position_element = "float";
      break;
    default:
      check(false, "positions has dtype ", dtype_text(a.positions),
            "; it must be int32, int64 or float32");
  }
  const int64_t rank = a.positions.dim();
  check(rank >= 1 && rank <= 3, "positions has ", rank, " dimensions, shape ",
        shape_text(a.positions), "; it must have 1 to 3: (section, batch, length)");
  p.sizes = {1, 1, 1};
  for (int64_t dim = 0; dim < rank; ++dim) {
    p.sizes[3 - rank + dim] = check_length("positions", a.positions, dim, "size");
  }
  check_storage("positions", a.positions);
  check(std::isfinite(static_cast<float>(a.attention_factor)), "attention_factor is ",
        a.attention_factor, "; it must be finite in float32");
  p.dtype = a.dtype.value_or(ScalarType::Float);
  p.element = check_element("dtype", p.dtype);
  const double bytes = static_cast<double>(p.sizes[0]) * static_cast<double>(p.sizes[1]) *
                       static_cast<double>(p.sizes[2]) * p.columns * element_bytes(p.element);
  check(bytes < static_cast<double>(std::numeric_limits<int64_t>::max()), "positions has shape ",
        shape_text(a.positions), "; the tables would be over 2^63 bytes");
  if (p.launches()) {
    p.grid = checked_grid("positions", {p.columns, p.sizes[2], p.sizes[0] * p.sizes[1]});
  }
  return p;
}

Defines defines_of(const TablesProblem& p) {
  return {{"TABLE_ELEMENT", element_name(p.element)}, {"POSITION_ELEMENT", p.position_element}};
}

Launch launch_of(const TablesProblem& p, const RopeTablesArguments& a, const Tensor& cos,
                 const Tensor& sin) {
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
  launch.program.defines = defines_of(p);
  launch.buffers = {{ROPE_TABLES_INV_FREQ, a.inv_freq, false},
                    {ROPE_TABLES_POSITIONS, a.positions, false},
                    {ROPE_TABLES_COS, cos, true},
                    {ROPE_TABLES_SIN, sin, true}};
  launch.params_slot = ROPE_TABLES_PARAMS;
  launch.params.set(params);
  launch.threadgroups = p.grid.threadgroups;
  launch.threads = p.grid.threads;
  return launch;
}

std::string explanation(const char* kernel, const Defines& defines, const Grid& grid,
                        const Tensor& first, const std::string& reason) {
  return JsonObject()
      .add("kernel", kernel)
      .add("defines", defines)
      .add("grid", grid.threadgroups)
      .add("threads", grid.threads)
      .add("threadgroup_bytes", int64_t{0})
      .add("backend", first.is_cpu() ? "simulator" : "mps")
      .add("reason", reason)
      .text();
}

}  // namespace

std::tuple<Tensor, Tensor> rope(const RopeArguments& a, Backend& backend) {
  const Problem p = analyse(a, false);
  Tensor q_out = new_empty_like(a.q);
  Tensor k_out = a.k.has_value() ? new_empty_like(*a.k) : new_empty(a.q, {0}, a.q.scalar_type());
  if (p.launches()) {
    backend.run(launch_of(p, a, q_out, k_out));
  }
  return {q_out, k_out};
}

void rope_inplace(const RopeArguments& a, Backend& backend) {
  const Problem p = analyse(a, true);
  if (p.launches()) {
    backend.run(launch_of(p, a, a.q, a.k.has_value() ? *a.k : a.q));
  }
}

std::tuple<Tensor, Tensor> rope_tables(const RopeTablesArguments& a, Backend& backend) {
  const TablesProblem p = analyse(a);
  Dims sizes = sizes_of(a.positions);
  sizes.push_back(p.columns);
  Tensor cos = new_empty(a.inv_freq, sizes, p.dtype);
  Tensor sin = new_empty(a.inv_freq, sizes, p.dtype);
  if (p.launches()) {
    backend.run(launch_of(p, a, cos, sin));
  }
  return {cos, sin};
}

std::string rope_explain(const RopeArguments& a, bool in_place) {
  const Problem p = analyse(a, in_place);
  const std::string reason = p.launches()
                                 ? std::to_string(p.vector) + " pairs of columns a thread, for " +
                                       std::to_string(p.shares.heads) + " heads"
                                 : "nothing to turn: no kernel is launched";
  return explanation("rope", defines_of(p), p.grid, a.q, reason);
}

std::string rope_tables_explain(const RopeTablesArguments& a) {
  const TablesProblem p = analyse(a);
  return explanation(
      "rope_tables", defines_of(p), p.grid, a.inv_freq,
      p.launches() ? "one cos and sin a thread" : "the tables are empty: no kernel is launched");
}

}  // namespace metal_attn
