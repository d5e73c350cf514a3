#include "csrc/ops/rope/check.h"

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "csrc/ops/common/check.h"
#include "csrc/ops/common/overlap.h"

namespace metal_attn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// (P, R / 2), (1, P, R / 2) or (B, P, R / 2).
void check_table(ArgumentName name, const Tensor& table, int32_t batch, int32_t head_dim) {
  const int64_t rank = table.dim();
  check(rank == 2 || rank == 3, name, " has ", rank, " dimensions, shape ", shape_text(table),
        "; it must have 2 or 3: (positions, R / 2) or (batch, positions, R / 2)");
  check(rank == 2 || table.size(0) == 1 || table.size(0) == batch, name, " has a batch of ",
        table.size(0), " and `q` of ", batch, "; it must be 1 or equal");
  check(2 * table.size(rank - 1) <= head_dim, name, " has ", table.size(rank - 1),
        " columns and `q` a head dim of ", head_dim, "; they must be at most half of it");
  check_storage(name, table);
}

// Returns Metal's name of the dtype.
const char* check_row_index(ArgumentName name, const Tensor& tensor, bool long_allowed) {
  const ScalarType dtype = tensor.scalar_type();
  check(dtype == ScalarType::Int || (long_allowed && dtype == ScalarType::Long), name,
        " has dtype ", dtype_text(tensor), "; it must be ",
        long_allowed ? "int32 or int64" : "int32");
  check_storage(name, tensor);
  return dtype == ScalarType::Int ? "int" : "long";
}

void check_rows(const RopeArguments& a, RopeProblem& p) {
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
    check(fits, "`positions` has shape ", shape_text(positions), "; it must be (", p.length,
          ",), (1, ", p.length, ") or (", p.batch, ", ", p.length, ")");
    check(a.seqlen_offset == 0, "`seqlen_offset` is ", a.seqlen_offset,
          " and `positions` is given, which says everything: leave `seqlen_offset` 0");
    check(
        !a.seqlen_offsets.has_value(),
        "`seqlen_offsets` is given and so is `positions`, which says everything: give one of them");
    return;
  }
  if (a.seqlen_offsets.has_value()) {
    const Tensor& offsets = *a.seqlen_offsets;
    check_device("seqlen_offsets", offsets);
    check_same_device("seqlen_offsets", offsets, "q", a.q);
    p.row_element = check_row_index("seqlen_offsets", offsets, false);
    check(offsets.dim() == 1 && offsets.size(0) == p.batch, "`seqlen_offsets` has shape ",
          shape_text(offsets), "; it must be (", p.batch, ",)");
    check(a.seqlen_offset >= -kMaxLength && a.seqlen_offset <= kMaxLength, "`seqlen_offset` is ",
          a.seqlen_offset, "; it must be in -", kMaxLength, "..", kMaxLength);
    return;
  }
  const int64_t most = int64_t{p.table_rows} - p.length;
  check(p.length == 0 || (a.seqlen_offset >= 0 && a.seqlen_offset <= most), "`seqlen_offset` is ",
        a.seqlen_offset, " and `q` has a length of ", p.length, "; they must stay within the ",
        p.table_rows, " rows of `cos`");
}

void check_in_place(const RopeArguments& a) {
  std::vector<std::pair<ArgumentName, const Tensor*>> written{{"q", &a.q}};
  if (a.k.has_value()) {
    written.push_back({"k", &*a.k});
  }
  for (const auto& [name, tensor] : written) {
    check(!may_overlap_itself(*tensor), name, " has shape ", shape_text(*tensor), " and strides ",
          stride_text(*tensor),
          ": elements may share memory, so it cannot be rotated in place; call ", name,
          ".clone() first, or rope");
  }
  if (a.k.has_value()) {
    check(
        !may_overlap(a.q, *a.k),
        "`k` may share elements with `q`, so they cannot be rotated in place together; if they do "
        "not, call rope_ for each of them");
  }
  std::vector<std::pair<ArgumentName, const Tensor*>> read{{"cos", &a.cos}, {"sin", &a.sin}};
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

void check_output_size(ArgumentName name, const Tensor& tensor) {
  double bytes = static_cast<double>(tensor.element_size());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    bytes *= static_cast<double>(tensor.size(dim));
  }
  check(bytes < static_cast<double>(std::numeric_limits<int64_t>::max()), name, " has shape ",
        shape_text(tensor), "; the result would be over 2^63 bytes");
}

}  // namespace

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
    check_device("k", k);
    check_same_device("k", k, "q", a.q);
    check_same_dtype("k", k, "q", a.q);
    check_rank("k", k, 4, layout);
    check(k.size(0) == p.batch, "`k` has a batch of ", k.size(0), " and `q` of ", p.batch,
          "; they must be equal");
    check(k.size(2) == p.length, "`k` has a length of ", k.size(2), " and `q` of ", p.length,
          "; they must be equal");
    check(k.size(3) == p.head_dim, "`k` has a head dim of ", k.size(3), " and `q` of ", p.head_dim,
          "; they must be equal");
    heads += check_length("k", k, 1, "number of heads");
    check(heads <= kMaxLength, "`q` and `k` have ", heads, " heads together; it must be at most ",
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
  check(same_sizes(a.sin, a.cos.sizes()), "`sin` has shape ", shape_text(a.sin), " and `cos` ",
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
  return p;
}

RopeTablesProblem check_rope_tables(const RopeTablesArguments& a) {
  RopeTablesProblem p{};
  check_device("inv_freq", a.inv_freq);
  check(check_element("inv_freq", a.inv_freq) == Element::kFloat, "`inv_freq` has dtype ",
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
      check(false, "`positions` has dtype ", dtype_text(a.positions),
            "; it must be int32, int64 or float32");
  }
  const int64_t rank = a.positions.dim();
  check(rank >= 1 && rank <= 3, "`positions` has ", rank, " dimensions, shape ",
        shape_text(a.positions), "; it must have 1 to 3: (section, batch, length)");
  p.sizes = {1, 1, 1};
  for (int64_t dim = 0; dim < rank; ++dim) {
    p.sizes[3 - rank + dim] = check_length("positions", a.positions, dim, "size");
  }
  check_storage("positions", a.positions);
  check(std::isfinite(static_cast<float>(a.attention_factor)), "`attention_factor` is ",
        a.attention_factor, "; it must be finite in float32");
  p.dtype = a.dtype.value_or(ScalarType::Float);
  p.element = check_element("dtype", p.dtype);
  const double bytes = static_cast<double>(p.sizes[0]) * static_cast<double>(p.sizes[1]) *
                       static_cast<double>(p.sizes[2]) * p.columns * element_bytes(p.element);
  check(bytes < static_cast<double>(std::numeric_limits<int64_t>::max()), "`positions` has shape ",
        shape_text(a.positions), "; the tables would be over 2^63 bytes");
  return p;
}

}  // namespace metal_attn
