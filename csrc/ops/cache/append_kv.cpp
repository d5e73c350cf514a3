#include "csrc/ops/cache/append_kv.h"

#include <tuple>

#include "csrc/ops/cache/check.h"
#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/overlap.h"
#include "csrc/ops/common/recorder.h"
#include "csrc/ops/rope/rotation.h"
#include "csrc/problem/rope.h"
#include "csrc/problem/strides.h"

namespace metal_attn {
namespace {

constexpr char kNewLayout[] = "(batch, heads, length, head_dim)";
constexpr char kPackedLayout[] = "(tokens, heads, head_dim)";

void check_layout(ArgumentName name, const Tensor& tensor, int64_t rank, const char* layout) {
  check_rank(name, tensor, rank, layout);
  check_rows(name, tensor);
}

// Checks the layout of k, v or q.
void check_new(ArgumentName name, const Tensor& tensor, const AppendKvArguments& a) {
  check_layout(name, tensor, a.packed ? 3 : 4, a.packed ? kPackedLayout : kNewLayout);
}

// The expected shape of k, v or q.
Dims new_shape(const AppendKvArguments& a, int64_t batch, int64_t heads, int64_t length,
               int64_t columns) {
  return a.packed ? Dims{length, heads, columns} : Dims{batch, heads, length, columns};
}

// The number of rows of sequence b. ends: the cu_seqlens of packed rows, or null.
int64_t rows_of(const int32_t* ends, int64_t b, int64_t length) {
  return ends != nullptr ? int64_t{ends[b + 1]} - ends[b] : length;
}

void check_new_rows(const AppendKvArguments& a, AppendKvProblem& p) {
  check_device("k", a.k);
  p.element = check_element("k", a.k);
  check_same_device("v", a.v, "k", a.k);
  check_same_dtype("v", a.v, "k", a.k);
  check_new("k", a.k, a);
  check_new("v", a.v, a);
  const int64_t columns = a.k.dim() - 1;
  p.kv_heads = check_length("k", a.k, 1, "number of heads");
  p.length = check_length("k", a.k, a.packed ? 0 : 2, "length");
  if (a.packed) {
    const auto& [cu_seqlens_q, cu_seqlens_k_new, k_new_name] = *a.packed;
    check_ends("cu_seqlens_q", cu_seqlens_q, a.k);
    check_ends(k_new_name, cu_seqlens_k_new, a.k);
    p.batch = check_length("cu_seqlens_q", cu_seqlens_q, 0, "length") - 1;
    check_shape(k_new_name, cu_seqlens_k_new, {{int64_t{p.batch} + 1}});
    check_cu_seqlens(k_new_name, cu_seqlens_k_new, p.length, p.length, "k");
  } else {
    p.batch = check_length("k", a.k, 0, "batch");
  }
  check_shape("v", a.v, {new_shape(a, p.batch, p.kv_heads, p.length, a.v.size(columns))});
  p.head_dim_qk = check_head_dim("k", a.k.size(columns), kMaxLength);
  p.head_dim_v = check_head_dim("v", a.v.size(columns), kMaxLength);
}

void check_caches(const AppendKvArguments& a, AppendKvProblem& p) {
  check_same_device("k_cache", a.k_cache, "k", a.k);
  check_same_device("v_cache", a.v_cache, "k", a.k);
  p.formats = check_kv_formats(a.cache, a.k, a.k_cache, a.v_cache);
  p.cache_element = differing_element(p.formats, p.element, a.k_cache);
  const char* layout = cache_layout(a.cache);
  check_layout("k_cache", a.k_cache, 4, layout);
  check_layout("v_cache", a.v_cache, 4, layout);
  p.capacity = check_cache_capacity(a.cache, a.k_cache, a.k, p.batch);
  p.cache_size = static_cast<int32_t>(a.k_cache.size(0));
  p.page_size = a.cache.block_table ? static_cast<int32_t>(a.k_cache.size(2)) : 0;
  for (const auto& [name, rows, cache_name, cache] :
       {std::tuple{"k", &a.k, "k_cache", &a.k_cache}, {"v", &a.v, "v_cache", &a.v_cache}}) {
    check_equal(name, rows->size(1), cache_name, cache->size(1), "a number of heads");
  }
  for (const auto& [name, cache, head_dim, format] :
       {std::tuple{"k_cache", &a.k_cache, p.head_dim_qk, p.formats.k},
        {"v_cache", &a.v_cache, p.head_dim_v, p.formats.v}}) {
    const int64_t size = kv_last_size(head_dim, format);
    check_shape(name, *cache, {{p.cache_size, p.kv_heads, a.k_cache.size(2), size}});
  }
  check_scales(a.cache, p.formats, a.k_cache, a.v_cache, p.batch);
  p.hadamard = check_hadamard(a.hadamard, a.cache.names, p.formats, p.head_dim_qk, p.head_dim_v);
}

void check_indices(const AppendKvArguments& a, AppendKvProblem& p) {
  for (const auto& [name, tensor] :
       present({{"cache_seqlens", &a.cache_seqlens}, {"leftpad_k", &a.leftpad_k}})) {
    check_index(name, *tensor, "k", a.k);
    check_shape(name, *tensor, {{p.batch}});
  }
  check(a.cache.indexed() || p.cache_size == p.batch, "`k_cache` has a batch of ", p.cache_size,
        " and `k` of ", p.batch, "; without `cache_batch_idx` they must be equal");
  check(a.packed || p.length <= p.capacity, "`k` has a length of ", p.length,
        "; it must be at most ", p.capacity, ", the number of rows of a sequence in `k_cache`");
}

void check_rotary(const AppendKvArguments& a, AppendKvProblem& p) {
  check(a.rotary_cos.has_value() == a.rotary_sin.has_value(),
        "only one of `rotary_cos` and `rotary_sin` is given; give both or neither");
  if (!a.rotary_cos) {
    check(!a.q, "`q` is given and `rotary_cos` is not; `q` can only be rotated: leave it out");
    check(!a.rotary_interleaved, "`rotary_interleaved` is True and `rotary_cos` is not given");
    check(a.rotary_first_column == 0, "`rotary_first_column` is ", a.rotary_first_column,
          " and `rotary_cos` is not given");
    return;
  }
  const Tensor& cos = *a.rotary_cos;
  const Tensor& sin = *a.rotary_sin;
  for (const auto& [name, table] : {Named{"rotary_cos", &cos}, Named{"rotary_sin", &sin}}) {
    check_same_device(name, *table, "k", a.k);
    check_element(name, *table);
    check_layout(name, *table, 2, "(rows, R / 2)");
  }
  check_same_dtype("rotary_sin", sin, "rotary_cos", cos);
  check_shape("rotary_sin", sin, {{cos.size(0), cos.size(1)}});
  p.table_element = check_element("rotary_cos", cos);
  p.table_rows = check_length("rotary_cos", cos, 0, "number of rows");
  check(p.table_rows > 0, "`rotary_cos` has no rows");
  check(2 * cos.size(1) <= p.head_dim_qk, "`rotary_cos` has ", Counted{cos.size(1), "column"},
        " and `k` has a head dim of ", p.head_dim_qk, "; `rotary_cos` may have at most ",
        p.head_dim_qk / 2, ", half the head dim");
  p.pairs = static_cast<int32_t>(cos.size(1));
  const int64_t last = p.head_dim_qk - 2 * p.pairs;
  check(0 <= a.rotary_first_column && a.rotary_first_column <= last, "`rotary_first_column` is ",
        a.rotary_first_column, "; it must be in 0..", last, ", as `k` has a head dim of ",
        p.head_dim_qk, " and `rotary_cos` rotates ", 2 * p.pairs, " columns");
  p.first_rotated = static_cast<int32_t>(a.rotary_first_column);
  if (a.q) {
    check_same_device("q", *a.q, "k", a.k);
    check_same_dtype("q", *a.q, "k", a.k);
    check_new("q", *a.q, a);
    p.q_heads = check_length("q", *a.q, 1, "number of heads");
    p.q_length = check_length("q", *a.q, a.packed ? 0 : 2, "length");
    check_shape("q", *a.q, {new_shape(a, p.batch, p.q_heads, p.q_length, p.head_dim_qk)});
    if (a.packed) {
      check_cu_seqlens("cu_seqlens_q", a.packed->cu_seqlens_q, p.q_length, p.q_length, "q");
    }
  }
}

// If one write serves both caches, v must be the first columns of k.
void check_v_in_k(const AppendKvArguments& a, AppendKvProblem& p) {
  p.v_in_k = v_in_k(a.cache, p.formats, a.k_cache, a.v_cache);
  if (!p.v_in_k || !p.writes()) { return; }
  check(has_leading_columns(a.k, a.v), "`v_cache` is the first ", p.head_dim_v,
        " columns of `k_cache`, and `v` is not the first ", p.head_dim_v,
        " columns of `k`; pass a `v_cache` with separate memory, or k[..., :", p.head_dim_v,
        "] as `v`");
  check(p.pairs == 0 || p.first_rotated >= p.head_dim_v, "`rotary_first_column` is ",
        p.first_rotated, " and `v_cache` is the first ", Counted{p.head_dim_v, "column"},
        " of `k_cache`; it must be at least ", p.head_dim_v, ", as values are not rotated");
}

void check_memory(const AppendKvArguments& a, const AppendKvProblem& p) {
  std::vector<Named> written{{"k_cache", &a.k_cache}};
  if (!p.v_in_k) { written.push_back({"v_cache", &a.v_cache}); }
  std::vector<Named> tables = present({{"cache_seqlens", &a.cache_seqlens},
                                       {"block_table", &a.cache.block_table},
                                       {"cache_batch_idx", &a.cache.cache_batch_idx},
                                       {"leftpad_k", &a.leftpad_k},
                                       {"rotary_cos", &a.rotary_cos},
                                       {"rotary_sin", &a.rotary_sin}});
  if (a.packed) {
    tables.push_back({"cu_seqlens_q", &a.packed->cu_seqlens_q});
    tables.push_back({a.packed->k_new_name, &a.packed->cu_seqlens_k_new});
  }
  for (const auto& [name, scale, format] : {std::tuple{"k_scale", &a.cache.k_scale, p.formats.k},
                                            {"v_scale", &a.cache.v_scale, p.formats.v}}) {
    if (*scale && (!p.v_in_k || scale == &a.cache.k_scale)) {
      (has_row_scales(format) ? written : tables).push_back({name, &**scale});
    }
  }
  if (a.q) { written.push_back({"q", &*a.q}); }
  check_written(written, {{"k", &a.k}, {"v", &a.v}}, tables);
}

void check_written_once(const AppendKvArguments& a, const AppendKvProblem& p,
                        const std::vector<SeenKeys>& new_keys) {
  std::vector<CachedRows> rows = cached_rows(a.cache, p.page_size, new_keys);
  std::sort(rows.begin(), rows.end(), [](const CachedRows& one, const CachedRows& other) {
    return std::tie(one.place, one.begin) < std::tie(other.place, other.begin);
  });
  for (std::size_t i = 1; i < rows.size(); ++i) {
    const CachedRows& one = rows[i - 1];
    const CachedRows& other = rows[i];
    check(one.place != other.place || one.end <= other.begin, "sequences ",
          std::min(one.sequence, other.sequence), " and ", std::max(one.sequence, other.sequence),
          " both write row ", other.begin, " of ", place_text(a.cache), one.place, " of `k_cache`");
  }
}

// Checks the values of indices on the CPU.
void check_values(const AppendKvArguments& a, const AppendKvProblem& p) {
  const int32_t* seqlens = values_on_cpu(a.cache_seqlens);
  const int32_t* leftpad = values_on_cpu(a.leftpad_k);
  const int32_t* k_ends = a.packed ? values_on_cpu(a.packed->cu_seqlens_k_new) : nullptr;
  const int32_t* q_ends = a.packed ? values_on_cpu(a.packed->cu_seqlens_q) : nullptr;
  const bool subtracts = leftpad != nullptr && a.rotary_from_leftpad;
  std::vector<SeenKeys> new_keys;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t first = seqlens != nullptr ? seqlens[b] : 0;
    const int64_t length = rows_of(k_ends, b, p.length);
    const int64_t queries = a.q ? rows_of(q_ends, b, p.q_length) : 0;
    const int64_t q_rows = a.rotate_q_by_token ? queries : std::min<int64_t>(queries, 1);
    const int64_t rotary_rows = std::max(length, q_rows);
    check(first >= 0 && first + length <= p.capacity, "`cache_seqlens`[", b, "] is ", first,
          " and `k` has ", Counted{length, "new row"},
          "; `cache_seqlens` must be at least 0 and the sum at most ", p.capacity,
          ", the number of rows of sequence ", b, " in ",
          a.cache.block_table ? "the pages of `block_table`" : "`k_cache`");
    new_keys.push_back(length > 0 ? SeenKeys{first, first + length} : SeenKeys{0, 0});
    const int64_t padding = leftpad != nullptr ? leftpad[b] : 0;
    check(padding >= 0, "`leftpad_k`[", b, "] is ", padding, "; it must be at least 0");
    const int64_t begin = first - (subtracts ? padding : 0);
    check(!a.rotary_cos || rotary_rows == 0 || (begin >= 0 && begin + rotary_rows <= p.table_rows),
          "sequence ", b, " needs rows ", begin, " to ", begin + rotary_rows - 1,
          " of `rotary_cos` (starting at ",
          subtracts ? "`cache_seqlens` - `leftpad_k`" : "`cache_seqlens`", "); they must be in 0..",
          p.table_rows - 1);
  }
  if (p.length > 0) {
    check_cache_values(a.cache, a.k_cache, new_keys);
    check_written_once(a, p, new_keys);
  }
}

}  // namespace

AppendKvProblem check_append_kv(const AppendKvArguments& a) {
  AppendKvProblem p{};
  check_new_rows(a, p);
  check_caches(a, p);
  check_indices(a, p);
  check_rotary(a, p);
  check_v_in_k(a, p);
  check_memory(a, p);
  if (a.k.is_cpu()) { check_values(a, p); }
  return p;
}

// The columns of a new row that a thread moves at a time.
constexpr int kUnitColumns = 8;

AppendWidths append_widths(const AppendKvArguments& a, const AppendKvProblem& p) {
  const bool whole_units = p.head_dim_qk % kUnitColumns == 0 && p.head_dim_v % kUnitColumns == 0;
  AppendWidths widths{};
  widths.loads = whole_units && rows_aligned_16(a.k) && rows_aligned_16(a.v);
  widths.stores = whole_units &&
                  rows_aligned(a.k_cache, kv_load_bytes(Element::kHalf, p.formats.k)) &&
                  rows_aligned(a.v_cache, kv_load_bytes(Element::kHalf, p.formats.v));
  widths.rotary = widths.loads && a.rotary_cos && rows_aligned_16(*a.rotary_cos) &&
                  rows_aligned_16(*a.rotary_sin) &&
                  rotates_by_chunks(p.element, p.first_rotated, 2 * p.pairs, a.rotary_interleaved);
  return widths;
}

AppendParams append_params(const AppendKvArguments& a, const AppendKvProblem& p) {
  AppendParams params{};
  params.k_strides = row_strides(a.k);
  params.v_strides = row_strides(a.v);
  params.k_cache_strides = row_strides(a.k_cache);
  params.v_cache_strides = row_strides(a.v_cache);
  params.k_scale_strides = scale_strides(a.cache.k_scale);
  params.v_scale_strides = scale_strides(a.cache.v_scale);
  if (a.rotary_cos) {
    params.cos_strides.row = a.rotary_cos->stride(0);
    params.sin_strides.row = a.rotary_sin->stride(0);
  }
  params.block_table_stride = a.cache.block_table ? a.cache.block_table->stride(0) : 0;
  params.length = p.length;
  params.capacity = p.capacity;
  params.cache_size = p.cache_size;
  params.table_rows = p.table_rows;
  params.rotary_from_leftpad = a.rotary_from_leftpad;
  return params;
}

namespace {

struct AppendKvSpecialisation {
  AppendWidths widths;
  int vector;  // pairs of q that a thread rotates
  HeadShares q_shares;
  int32_t block_rows;
  int32_t block_tokens;
  std::array<uint32_t, 3> threadgroups;
  uint32_t threads;
};

// The units that a thread moves if there are enough. Starting more threadgroups would take longer.
constexpr int64_t kPasses = 4;

int choose_vector(const AppendKvArguments& a, const AppendKvProblem& p) {
  int64_t vector = std::min({kMaxVector, aligned_vector(*a.q), aligned_vector(*a.rotary_cos),
                             aligned_vector(*a.rotary_sin)});
  while (p.pairs % vector != 0 || p.first_rotated % vector != 0) { vector /= 2; }
  return static_cast<int>(vector);
}

// Throws std::invalid_argument for a grid that Metal cannot count.
AppendKvSpecialisation choose_append_kv(const AppendKvArguments& a, const AppendKvProblem& p) {
  AppendKvSpecialisation s{};
  s.widths = append_widths(a, p);
  const int64_t row_units = divide_up(std::max(p.head_dim_qk, p.head_dim_v), kUnitColumns);
  int64_t work = p.writes() ? p.length * row_units : 0;
  s.block_rows = static_cast<int32_t>(std::max<int64_t>(kPasses * APPEND_THREADS / row_units, 1));
  int64_t blocks = divide_up(p.writes() ? p.length : 0, s.block_rows);
  int64_t head_groups = p.writes() ? p.kv_heads : 0;
  if (p.rotates_q()) {
    s.vector = choose_vector(a, p);
    const int64_t units = p.pairs / s.vector;
    s.q_shares = share_heads(static_cast<double>(p.batch) * p.q_length * units, p.q_heads);
    s.block_tokens = static_cast<int32_t>(std::max<int64_t>(APPEND_THREADS / units, 1));
    work = std::max(work, p.q_length * units);
    blocks = std::max(blocks, divide_up(p.q_length, s.block_tokens));
    head_groups += s.q_shares.groups;
  }
  s.threads = static_cast<uint32_t>(
      std::min<int64_t>(divide_up(work, kSimdgroupThreads) * kSimdgroupThreads, APPEND_THREADS));
  check(blocks * s.threads <= std::numeric_limits<uint32_t>::max(), "`k` has a length of ",
        p.length, " and `q` of ", p.q_length, "; the grid may have at most 2^32 - 1 threads");
  s.threadgroups = extent(blocks, head_groups, p.batch);
  return s;
}

Defines append_kv_defines(const AppendKvArguments& a, const AppendKvProblem& p,
                          const AppendKvSpecialisation& s) {
  Defines defines{{"ELEMENT", element_name(p.element)},
                  {"HEAD_DIM_QK", p.head_dim_qk},
                  {"HEAD_DIM_V", p.head_dim_v},
                  {"WIDE_LOADS", s.widths.loads},
                  {"WIDE_STORES", s.widths.stores}};
  const auto define = [&defines](const char* name, int value) {
    define_if(value != 0, defines, name, value);
  };
  define("PAGE_SIZE", p.page_size);
  if (p.cache_element) { defines.push_back({"KV_ELEMENT", element_name(*p.cache_element)}); }
  define("CACHE_BATCH_IDX", a.cache.cache_batch_idx.has_value());
  define("CACHE_SEQLENS", a.cache_seqlens.has_value());
  define("LEFTPAD_K", a.leftpad_k && a.rotary_from_leftpad);
  define("KV_FORMAT", static_cast<int>(p.formats.k));
  define("V_FORMAT", p.formats.v == p.formats.k ? 0 : static_cast<int>(p.formats.v));
  define("K_SCALE", a.cache.k_scale.has_value());
  define("V_SCALE", a.cache.v_scale.has_value());
  define("V_IN_K", p.v_in_k);
  define("HADAMARD", p.hadamard);
  if (p.pairs > 0) {
    define("NEW_K_ROTARY", 1);
    defines.push_back({"ROTARY_ELEMENT", element_name(p.table_element)});
    define("ROTARY_DIM", 2 * p.pairs);
    define("ROTARY_FIRST", p.first_rotated);
    defines.push_back({"ROTARY_INTERLEAVED", a.rotary_interleaved});
    define("WIDE_ROTARY", s.widths.rotary);
  }
  define("Q_ROTARY", p.rotates_q());
  define("VECTOR", p.rotates_q() ? s.vector : 1);
  define("HEADS", p.rotates_q() ? s.q_shares.heads : 1);
  return defines;
}

RopeParams rotated_q(const AppendKvArguments& a, const AppendKvProblem& p,
                     const AppendKvSpecialisation& s) {
  RopeParams params{};
  if (p.rotates_q()) {
    const RowStrides q = row_strides(*a.q);
    params.q_strides = {q.batch, q.head, q.row, 1};
    params.cos_strides = {0, a.rotary_cos->stride(0), 1};
    params.sin_strides = {0, a.rotary_sin->stride(0), 1};
    params.table_rows = p.table_rows;
    params.q_heads = p.q_heads;
    params.length = p.q_length;
    params.pairs = p.pairs;
    params.pair_units = p.pairs / s.vector;
    params.sine_sign = 1.0f;
  }
  return params;
}

Launch append_kv_launch(const AppendKvArguments& a, const AppendKvProblem& p,
                        const AppendKvSpecialisation& s) {
  AppendKvParams params{};
  params.append = append_params(a, p);
  params.q = rotated_q(a, p, s);
  params.kv_heads = p.writes() ? p.kv_heads : 0;
  params.block_rows = s.block_rows;
  params.block_tokens = s.block_tokens;
  params.rotate_q_by_token = a.rotate_q_by_token;

  Launch launch("append_kv", append_kv_defines(a, p, s));
  const auto add = [&](uint32_t slot, const Tensor& tensor, bool writable) {
    // Without new rows a tensor may have no memory. The kernel does not access it, so q is bound.
    launch.buffers.push_back({slot, tensor.numel() > 0 ? tensor : *a.q, writable});
  };
  const auto add_optional = [&](uint32_t slot, const OptionalTensor& tensor, bool writable) {
    if (tensor) { add(slot, *tensor, writable); }
  };
  add(APPEND_K, a.k, false);
  add(APPEND_V, a.v, false);
  add(APPEND_K_CACHE, a.k_cache, true);
  add(APPEND_V_CACHE, a.v_cache, true);
  add_optional(APPEND_K_SCALE, a.cache.k_scale, has_row_scales(p.formats.k));
  add_optional(APPEND_V_SCALE, a.cache.v_scale, has_row_scales(p.formats.v));
  add_optional(APPEND_SEQLENS, a.cache_seqlens, false);
  add_optional(APPEND_BLOCK_TABLE, a.cache.block_table, false);
  add_optional(APPEND_CACHE_BATCH_IDX, a.cache.cache_batch_idx, false);
  if (a.rotary_from_leftpad) { add_optional(APPEND_LEFTPAD_K, a.leftpad_k, false); }
  if (p.rotates_q()) { add(APPEND_Q, *a.q, true); }
  if (p.pairs > 0) {
    add(APPEND_COS, *a.rotary_cos, false);
    add(APPEND_SIN, *a.rotary_sin, false);
  }
  launch.set_params(APPEND_PARAMS, params);
  launch.threadgroups = s.threadgroups;
  launch.threads = {s.threads, 1, 1};
  return launch;
}

}  // namespace

void append_kv(const AppendKvArguments& a, Backend& backend) {
  const AppendKvProblem p = check_append_kv(a);
  if (p.writes() || p.rotates_q()) {
    const AppendKvSpecialisation s = choose_append_kv(a, p);
    note(backend, [&s] {
      return JsonObject().add(
          "reason", Counted{s.block_rows, "new row"}.str() + " of a KV head per threadgroup");
    });
    backend.run(append_kv_launch(a, p, s));
  }
}

}  // namespace metal_attn
