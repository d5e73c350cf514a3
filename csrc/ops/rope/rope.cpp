#include "csrc/ops/rope/rope.h"

#include <cmath>

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/overlap.h"
#include "csrc/ops/common/recorder.h"
#include "csrc/ops/rope/rotation.h"
#include "shaders/params/rope.h"

namespace metal_attn {
namespace {

struct RopeSpecialisation {
  int vector;  // pairs of columns that a thread rotates
  HeadShares shares;
  int32_t pair_units;  // vectors of a row's pairs
  int32_t units;       // vectors of a row's pairs and of its copied columns
  Grid grid;
};

void check_table(ArgumentName name, const Tensor& table, int32_t batch, int32_t head_dim) {
  const int64_t rank = table.dim();
  check(rank == 2 || rank == 3, name, " has ", Counted{rank, "dimension"}, ", shape ",
        shape_text(table),
        "; it must have 2 or 3: (positions, R / 2) or (batch, positions, R / 2)");
  check(rank == 2 || table.size(0) == 1 || table.size(0) == batch, name, " has a batch of ",
        table.size(0), " and `q` of ", batch, "; the batch of ", name, " must be 1 or ", batch);
  check(2 * table.size(rank - 1) <= head_dim, name, " has ",
        Counted{table.size(rank - 1), "column"}, " and `q` has a head dim of ", head_dim, "; ",
        name, " may have at most ", head_dim / 2, ", half the head dim");
  check_storage(name, table);
}

// Checks positions or offsets. Returns their Metal type.
const char* check_row_index(ArgumentName name, const Tensor& tensor,
                            std::initializer_list<ScalarType> allowed) {
  const ScalarType dtype = check_dtype(name, tensor, allowed);
  check_storage(name, tensor);
  return dtype == ScalarType::Int ? "int" : dtype == ScalarType::Long ? "long" : "float";
}

void check_rows(const RopeArguments& a, RopeProblem& p) {
  if (a.positions.has_value()) {
    const Tensor& positions = *a.positions;
    check_same_device("positions", positions, "q", a.q);
    p.row_element = check_row_index("positions", positions, {ScalarType::Int, ScalarType::Long});
    p.rows_are_positions = true;
    const int64_t rank = positions.dim();
    const bool fits =
        (rank == 1 || (rank == 2 && (positions.size(0) == 1 || positions.size(0) == p.batch))) &&
        positions.size(rank - 1) == p.length;
    check(fits, "`positions` has shape ", shape_text(positions), "; it must be (", p.length,
          ",), (1, ", p.length, ") or (", p.batch, ", ", p.length, ")");
    check(a.seqlen_offset == 0, "`seqlen_offset` is ", a.seqlen_offset,
          " and `positions` is given, which selects the rows: leave `seqlen_offset` at 0");
    check(!a.seqlen_offsets.has_value(),
          "`seqlen_offsets` and `positions` are both given; give one of them");
    return;
  }
  if (a.seqlen_offsets.has_value()) {
    const Tensor& offsets = *a.seqlen_offsets;
    check_same_device("seqlen_offsets", offsets, "q", a.q);
    p.row_element = check_row_index("seqlen_offsets", offsets, {ScalarType::Int});
    check(offsets.dim() == 1 && offsets.size(0) == p.batch, "`seqlen_offsets` has shape ",
          shape_text(offsets), "; it must be (", p.batch, ",)");
    check_offset("seqlen_offset", a.seqlen_offset);
    return;
  }
  const int64_t most = int64_t{p.table_rows} - p.length;
  check(p.length == 0 || (a.seqlen_offset >= 0 && a.seqlen_offset <= most), "`seqlen_offset` is ",
        a.seqlen_offset, " and `q` has a length of ", p.length,
        "; `seqlen_offset` must be at least 0 and the sum at most ", p.table_rows,
        ", the number of rows of `cos`");
}

void check_in_place(const RopeArguments& a) {
  std::vector<Named> written = present({{"k", &a.k}});
  written.insert(written.begin(), {"q", &a.q});
  std::vector<Named> tables =
      present({{"positions", &a.positions}, {"seqlen_offsets", &a.seqlen_offsets}});
  tables.insert(tables.end(), {{"cos", &a.cos}, {"sin", &a.sin}});
  check_written(written, {}, tables);
}

void check_output_size(ArgumentName name, const Tensor& tensor) {
  double bytes = static_cast<double>(tensor.element_size());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    bytes *= static_cast<double>(tensor.size(dim));
  }
  check(bytes < static_cast<double>(std::numeric_limits<int64_t>::max()), name, " has shape ",
        shape_text(tensor), "; the result must have fewer than 2^63 bytes");
}

RopeProblem check_rope(const RopeArguments& a, bool in_place) {
  RopeProblem p{};
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
  check(p.head_dim > 0, "`q` has a head dim of 0; it must be at least 1");
  check_storage("q", a.q);
  int64_t heads = p.q_heads;
  if (a.k.has_value()) {
    const Tensor& k = *a.k;
    check_same_device("k", k, "q", a.q);
    check_same_dtype("k", k, "q", a.q);
    check_rank("k", k, 4, layout);
    check_equal("k", k.size(0), "q", p.batch, "a batch");
    check_equal("k", k.size(2), "q", p.length, "a length");
    check_equal("k", k.size(3), "q", p.head_dim, "a head dim");
    heads += check_length("k", k, 1, "number of heads");
    check(heads <= kMaxLength, "`q` and `k` have ", heads, " heads together; it must be at most ",
          kMaxLength);
    check_storage("k", k);
  }
  p.heads = static_cast<int32_t>(heads);

  check_same_device("cos", a.cos, "q", a.q);
  check_same_device("sin", a.sin, "q", a.q);
  p.table_element = check_element("cos", a.cos);
  check_same_dtype("sin", a.sin, "cos", a.cos);
  check_table("cos", a.cos, p.batch, p.head_dim);
  check_storage("sin", a.sin);
  check(same_sizes(a.sin, a.cos.sizes()), "`sin` has shape ", shape_text(a.sin), " and `cos` ",
        shape_text(a.cos), "; they must be equal");
  p.table_rows = check_length("cos", a.cos, a.cos.dim() - 2, "number of rows");
  p.pairs = static_cast<int32_t>(a.cos.size(a.cos.dim() - 1));
  check_rows(a, p);
  if (in_place) {
    check_in_place(a);
  } else {
    check_output_size("q", a.q);
    if (a.k.has_value()) { check_output_size("k", *a.k); }
  }
  return p;
}

RopeTablesProblem check_rope_tables(const RopeTablesArguments& a) {
  RopeTablesProblem p{};
  check_device("inv_freq", a.inv_freq);
  check(check_element("inv_freq", a.inv_freq) == Element::kFloat, "`inv_freq` has dtype ",
        dtype_text(a.inv_freq), "; it must be float32, because fewer digits give wrong angles");
  check_rank("inv_freq", a.inv_freq, 1, "(R / 2)");
  p.columns = check_length("inv_freq", a.inv_freq, 0, "length");
  check_storage("inv_freq", a.inv_freq);
  check_same_device("positions", a.positions, "inv_freq", a.inv_freq);
  p.position_element = check_row_index("positions", a.positions,
                                       {ScalarType::Int, ScalarType::Long, ScalarType::Float});
  const int64_t rank = a.positions.dim();
  check(rank >= 1 && rank <= 3, "`positions` has ", Counted{rank, "dimension"}, ", shape ",
        shape_text(a.positions), "; it must have 1 to 3: (section, batch, length)");
  p.sizes = {1, 1, 1};
  for (int64_t dim = 0; dim < rank; ++dim) {
    p.sizes[3 - rank + dim] = check_length("positions", a.positions, dim, "size");
  }
  check(std::isfinite(static_cast<float>(a.attention_factor)), "`attention_factor` is ",
        a.attention_factor, "; it must be finite in float32");
  p.dtype = a.dtype.value_or(ScalarType::Float);
  p.element = check_element("dtype", p.dtype);
  const double bytes = static_cast<double>(p.sizes[0]) * static_cast<double>(p.sizes[1]) *
                       static_cast<double>(p.sizes[2]) * p.columns * element_bytes(p.element);
  check(bytes < static_cast<double>(std::numeric_limits<int64_t>::max()), "`positions` has shape ",
        shape_text(a.positions), "; the tables must have fewer than 2^63 bytes");
  return p;
}

// A grid of `sizes` threads. Threadgroups of up to ROPE_THREADS fill the dimensions in order.
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

// Outputs are dense, so they are aligned if the head dim is a multiple of the vector.
int choose_vector(const RopeArguments& a, const RopeProblem& p) {
  int64_t vector = std::min(
      {int64_t{kMaxVector}, aligned_vector(a.q), aligned_vector(a.cos), aligned_vector(a.sin)});
  if (a.k.has_value()) { vector = std::min(vector, aligned_vector(*a.k)); }
  while (vector > 1 && (p.pairs % vector != 0 || (!p.in_place && p.head_dim % vector != 0))) {
    vector /= 2;
  }
  return static_cast<int>(vector);
}

RopeSpecialisation choose_rope(const RopeArguments& a, const RopeProblem& p) {
  RopeSpecialisation s{};
  s.vector = choose_vector(a, p);
  s.pair_units = p.pairs / s.vector;
  s.units = s.pair_units;
  if (!p.in_place) {
    s.units += static_cast<int32_t>(divide_up(p.head_dim - 2 * p.pairs, 2 * s.vector));
  }
  s.shares = share_heads(static_cast<double>(p.batch) * p.length * s.units, p.heads);
  if (p.launches()) {
    s.grid = checked_grid("q", {s.units, p.length, int64_t{p.batch} * s.shares.groups});
  }
  return s;
}

Defines rope_defines(const RopeProblem& p, const RopeSpecialisation& s) {
  return {
      {"ELEMENT", element_name(p.element)},
      {"TABLE_ELEMENT", element_name(p.table_element)},
      {"VECTOR", s.vector},
      {"HEADS", s.shares.heads},
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

Launch rope_launch(const RopeArguments& a, const RopeProblem& p, const RopeSpecialisation& s,
                   const Tensor& q_out, const Tensor& k_out) {
  // A tensor that is missing or has no memory is replaced by another tensor, which no thread reads.
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

  Launch launch("rope", rope_defines(p, s));
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
  launch.set_params(ROPE_PARAMS, params);
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

  Launch launch("rope_tables", {{"TABLE_ELEMENT", element_name(p.element)},
                                {"POSITION_ELEMENT", p.position_element}});
  launch.buffers = {{ROPE_TABLES_INV_FREQ, a.inv_freq, false},
                    {ROPE_TABLES_POSITIONS, a.positions, false},
                    {ROPE_TABLES_COS, cos, true},
                    {ROPE_TABLES_SIN, sin, true}};
  launch.set_params(ROPE_TABLES_PARAMS, params);
  launch.threadgroups = grid.threadgroups;
  launch.threads = grid.threads;
  return launch;
}

void run(const Launch& launch, const RopeSpecialisation& s, Backend& backend) {
  note(backend, [&s] {
    return JsonObject().add("reason", Counted{s.vector, "pair"}.str() +
                                          " of columns per thread, for " +
                                          Counted{s.shares.heads, "head"});
  });
  backend.run(launch);
}

}  // namespace

std::tuple<Tensor, Tensor> rope(const RopeArguments& a, Backend& backend) {
  const RopeProblem p = check_rope(a, false);
  const RopeSpecialisation s = choose_rope(a, p);
  Tensor q_out = new_empty_like(a.q);
  Tensor k_out = a.k.has_value() ? new_empty_like(*a.k) : new_empty(a.q, {0}, a.q.scalar_type());
  if (p.launches()) { run(rope_launch(a, p, s, q_out, k_out), s, backend); }
  return {q_out, k_out};
}

void rope_inplace(const RopeArguments& a, Backend& backend) {
  const RopeProblem p = check_rope(a, true);
  const RopeSpecialisation s = choose_rope(a, p);
  if (p.launches()) { run(rope_launch(a, p, s, a.q, a.k.has_value() ? *a.k : a.q), s, backend); }
}

std::tuple<Tensor, Tensor> rope_tables(const RopeTablesArguments& a, Backend& backend) {
  const RopeTablesProblem p = check_rope_tables(a);
  const Grid grid =
      p.launches() ? checked_grid("positions", {p.columns, p.sizes[2], p.sizes[0] * p.sizes[1]})
                   : Grid{};
  Dims sizes = sizes_of(a.positions);
  sizes.push_back(p.columns);
  Tensor cos = new_empty(a.inv_freq, sizes, p.dtype);
  Tensor sin = new_empty(a.inv_freq, sizes, p.dtype);
  if (p.launches()) {
    note(backend, [] { return JsonObject().add("reason", "one cos and one sin per thread"); });
    backend.run(rope_tables_launch(a, p, grid, cos, sin));
  }
  return {cos, sin};
}

}  // namespace metal_attn
