#include "csrc/ops/attention/check.h"

#include <cmath>
#include <numbers>

#include "csrc/ops/attention/flex.h"
#include "csrc/ops/cache/check.h"
#include "csrc/ops/common/allocate.h"

namespace metal_attn {
namespace {

constexpr int kMaxHeadDimQk = 576;

// Checks shapes, dtypes and strides of q, k and v. Writes the formats of k and v to `formats`.
Element check_operands(const FlashFwdArguments& a, KvFormats& formats) {
  check_device("q", a.q);
  check_same_device("k", a.k, "q", a.q);
  check_same_device("v", a.v, "q", a.q);
  const Element element = check_element("q", a.q);
  formats = a.cache.checked ? a.cache.checked->formats : check_kv_formats(a.cache, a.q, a.k, a.v);
  const bool packed = a.packing.has_value();
  const bool indexed = a.cache.indexed();
  const int64_t rank = packed ? 3 : 4;
  const int64_t kv_rank = indexed || !a.packs_keys() ? 4 : 3;
  const char* q_layout =
      packed ? "(tokens, heads, head_dim)" : "(batch, heads, q_length, head_dim)";
  const char* kv_layout = indexed          ? cache_layout(a.cache)
                          : a.packs_keys() ? "(tokens, kv_heads, head_dim)"
                                           : "(batch, kv_heads, kv_length, head_dim)";
  check_rank("q", a.q, rank, q_layout);
  check_rank("k", a.k, kv_rank, kv_layout);
  check_rank("v", a.v, kv_rank, kv_layout);
  if (indexed) {
    check_equal("v", a.v.size(0), "k", a.k.size(0),
                a.cache.block_table ? "a number of pages" : "a batch");
  } else if (!a.packs_keys()) {
    const int64_t batch = packed ? a.packing->cu_seqlens_q.numel() - 1 : a.q.size(0);
    const ArgumentName batch_name = packed ? "cu_seqlens_q" : "q";
    check_equal("k", a.k.size(0), batch_name, batch, "a batch");
    check_equal("v", a.v.size(0), batch_name, batch, "a batch");
  }
  const int64_t length_dim = kv_rank == 3 ? 0 : 2;
  check_equal("v", a.v.size(1), "k", a.k.size(1), "a number of heads");
  check_equal("v", a.v.size(length_dim), "k", a.k.size(length_dim), "a length");
  check_equal("k", kv_columns(a.k, formats.k), "q", a.q.size(rank - 1), "a head dim");
  const int64_t heads = a.q.size(1);
  const int64_t kv_heads = a.k.size(1);
  check(heads == 0 || (kv_heads > 0 && heads % kv_heads == 0), "`q` has ", Counted{heads, "head"},
        " and `k` ", kv_heads, "; the number of heads of `k` must divide that of `q`");
  for (const auto& [name, tensor] : {std::pair{"q", &a.q}, {"k", &a.k}, {"v", &a.v}}) {
    check_rows(name, *tensor);
  }
  return element;
}

double checked_scale(const FlashFwdOptions& options, int head_dim) {
  const double scale = options.softmax_scale.value_or(1.0 / std::sqrt(double(head_dim)));
  check(std::isfinite(static_cast<float>(scale * std::numbers::log2e)), "`softmax_scale` is ",
        scale, "; its product with log2(e) must be finite in float32");
  return scale;
}

void check_numbers(const FlashFwdOptions& o, double scale) {
  const float cap = static_cast<float>(o.softcap * std::numbers::log2e);
  check(o.softcap == 0.0 || (cap > 0.0f && std::isfinite(cap) &&
                             std::isfinite(static_cast<float>(scale / o.softcap))),
        "`softcap` is ", o.softcap,
        "; it must be 0 (off) or positive such that `softcap` * log2(e) and `softmax_scale` / "
        "`softcap` are finite in float32");
  check(!o.causal || o.window_size_right <= 0, "`window_size_right` is ", o.window_size_right,
        " and causal=True sets it to 0; leave it at -1");
  check(0 <= o.attention_chunk && o.attention_chunk <= kMaxLength, "`attention_chunk` is ",
        o.attention_chunk, "; it must be 0 (off) or in 1..", kMaxLength);
  check_offset("q_offset", o.q_offset.value_or(0));
}

// True if append_kv has checked the cache for a call with this number of sequences.
bool is_checked(const CacheOptions& cache, int32_t batch) {
  return cache.checked && cache.checked->batch == batch;
}

int32_t capacity_of(const FlashFwdArguments& a, int32_t batch) {
  return is_checked(a.cache, batch) ? a.cache.checked->capacity
                                    : check_cache_capacity(a.cache, a.k, a.q, batch);
}

// Checks the packing, and writes its sizes to `call`.
void check_packing(const FlashFwdArguments& a, FlashFwdCall& call) {
  const Packing& packing = *a.packing;
  check_ends("cu_seqlens_q", packing.cu_seqlens_q, a.q);
  if (packing.cu_seqlens_k) {
    check_ends("cu_seqlens_k", *packing.cu_seqlens_k, a.q);
    check_equal("cu_seqlens_k", packing.cu_seqlens_k->numel(), "cu_seqlens_q",
                packing.cu_seqlens_q.numel(), "a length");
  }
  for (const auto& [name, size] : {std::pair{ArgumentName("max_seqlen_q"), packing.max_seqlen_q},
                                   {"max_seqlen_k", packing.max_seqlen_k}}) {
    check(0 <= size && size <= kMaxLength, name, " is ", size, "; it must be in 0..", kMaxLength);
  }
  call.batch = check_length("cu_seqlens_q", packing.cu_seqlens_q, 0, "length") - 1;
  call.q_total = check_length("q", a.q, 0, "length");
  call.q_length = static_cast<int32_t>(packing.max_seqlen_q);
  check_cu_seqlens("cu_seqlens_q", packing.cu_seqlens_q, call.q_total, packing.max_seqlen_q,
                   "max_seqlen_q");
  const bool in_cache = a.cache.indexed() || !packing.cu_seqlens_k;
  call.kv_total = in_cache ? capacity_of(a, call.batch) : check_length("k", a.k, 0, "length");
  if (!packing.cu_seqlens_k) {
    call.kv_length = call.kv_total;
    return;
  }
  call.kv_length = static_cast<int32_t>(packing.max_seqlen_k);
  if (in_cache) {
    check_steps("cu_seqlens_k", *packing.cu_seqlens_k, packing.max_seqlen_k, "max_seqlen_k");
    check_steps("cu_seqlens_k", *packing.cu_seqlens_k, call.kv_total,
                a.cache.block_table ? "the length of block_table's pages" : "the cache's length");
  } else {
    check_cu_seqlens("cu_seqlens_k", *packing.cu_seqlens_k, call.kv_total, packing.max_seqlen_k,
                     "max_seqlen_k");
  }
}

// Checks that each length is at most the number of keys of its sequence.
void check_lengths(ArgumentName name, const OptionalTensor& lengths, const FlashFwdArguments& a,
                   const FlashFwdCall& call) {
  if (!lengths) { return; }
  check_index(name, *lengths, "q", a.q);
  check_shape(name, *lengths, {{call.batch}});
  const int32_t* values = values_on_cpu(*lengths);
  if (values == nullptr) { return; }
  const int32_t* ends = a.packing ? values_on_cpu(a.packing->cu_seqlens_k) : nullptr;
  for (int64_t b = 0; b < call.batch; ++b) {
    const int32_t keys = ends != nullptr ? ends[b + 1] - ends[b] : call.kv_length;
    const bool paged = a.cache.block_table && ends == nullptr;
    check(0 <= values[b] && values[b] <= keys, name, "[", b, "] is ", values[b],
          "; it must be in 0..", keys, ", because ", paged ? "the pages of " : "", "sequence ", b,
          paged ? " in `block_table` hold " : " has ", Counted{keys, "key"});
  }
}

// True if out or a tensor that kernels read has long offsets.
bool reads_long_offsets(const FlashFwdArguments& a, const FlashFwdCall& call) {
  const FlashFwdProblem& p = call.problem;
  const FlashFwdOptions& o = a.options;
  bool is_long = a.q.numel() / std::max(p.head_dim_qk, 1) > kMaxLength / std::max(p.head_dim_v, 1);
  for (const Tensor* tensor : {&a.q, &a.k, &a.v}) {
    is_long = is_long || has_long_offsets(*tensor);
  }
  for (const OptionalTensor* operand :
       {&call.mask, &call.bias, &o.q_rotary_cos, &o.q_rotary_sin, &o.k_rotary_cos, &o.k_rotary_sin,
        &a.cache.k_scale, &a.cache.v_scale}) {
    is_long = is_long || has_long_offsets(*operand);
  }
  return is_long || (a.flex && has_long_lists(*a.flex));
}

// True if keys 2i and 2i + 1 always lie in one aligned vector.
bool has_aligned_pairs(const Tensor& mask, int32_t kv_length) {
  const int64_t last = mask.dim() - 1;
  return last >= 0 && kv_length % 2 == 0 && mask.size(last) == kv_length &&
         mask.stride(last) == 1 && rows_aligned(mask, 2 * static_cast<int>(mask.element_size()));
}

// Checks shape and memory of a mask or a bias. element: the element of a bias, unused for a mask.
MaskOperand check_mask_operand(ArgumentName name, const Tensor& mask, Element element,
                               const FlashFwdArguments& a, const FlashFwdCall& call) {
  check_same_device(name, mask, "q", a.q);
  check_broadcasts(name, mask, {call.batch, call.heads, call.q_length, call.kv_length});
  check_storage(name, mask);
  return {element, has_aligned_pairs(mask, call.kv_length)};
}

void check_masks(const FlashFwdArguments& a, FlashFwdCall& call, FlashFwdFeatures& features) {
  call.bias = a.options.attn_bias;
  ArgumentName bias_name = "attn_bias";
  if (const OptionalTensor& mask = a.options.attn_mask) {
    const ScalarType dtype =
        check_dtype("attn_mask", *mask,
                    {ScalarType::Bool, ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
    if (dtype == ScalarType::Bool) {
      features.mask = check_mask_operand("attn_mask", *mask, Element::kHalf, a, call);
      call.mask = mask;
    } else {
      check(!call.bias,
            "`attn_mask` is floating and `attn_bias` is also given; pass their sum as `attn_bias`");
      call.bias = mask;
      bias_name = "attn_mask";
    }
  }
  if (call.bias) {
    const Element element = check_element(bias_name, *call.bias);
    features.bias = check_mask_operand(bias_name, *call.bias, element, a, call);
  }
}

void check_score_options(const FlashFwdArguments& a, const FlashFwdCall& call,
                         FlashFwdFeatures& features) {
  if (const OptionalTensor& slopes = a.options.alibi_slopes) {
    check_operand("alibi_slopes", *slopes, "q", a.q, {ScalarType::Float},
                  {{call.heads}, {call.batch, call.heads}});
    features.alibi = true;
  }
  if (const OptionalTensor& sink = a.options.learnable_sink) {
    features.sink = check_sink(*sink, call.heads, "q", a.q);
  }
}

struct RotaryTable {
  ArgumentName name;
  const OptionalTensor& tensor;
  int32_t length;
};

void check_rotary(const FlashFwdArguments& a, const FlashFwdCall& call, int head_dim,
                  FlashFwdFeatures& features) {
  const FlashFwdOptions& o = a.options;
  const std::array<RotaryTable, 4> tables{{
      {"q_rotary_cos", o.q_rotary_cos, call.q_length},
      {"q_rotary_sin", o.q_rotary_sin, call.q_length},
      {"k_rotary_cos", o.k_rotary_cos, call.kv_length},
      {"k_rotary_sin", o.k_rotary_sin, call.kv_length},
  }};
  for (int i : {0, 2}) {  // the table of sines follows the one of cosines
    check(tables[i].tensor.has_value() == tables[i + 1].tensor.has_value(), "only one of ",
          tables[i].name, " and ", tables[i + 1].name, " is given; give both or neither");
  }
  const RotaryTable* first = nullptr;
  bool aligned = true;
  for (const RotaryTable& table : tables) {
    if (!table.tensor) { continue; }
    const Tensor& tensor = *table.tensor;
    check_same_device(table.name, tensor, "q", a.q);
    check_element(table.name, tensor);
    const int64_t rank = tensor.dim();
    const int64_t dim = rank > 0 ? 2 * tensor.size(rank - 1) : 0;
    check((rank == 2 || (rank == 3 && (tensor.size(0) == 1 || tensor.size(0) == call.batch))) &&
              tensor.size(rank - 2) >= table.length && dim > 0 && dim <= head_dim,
          table.name, " has shape ", shape_text(tensor), "; it must be (length, R / 2) or (",
          call.batch, ", length, R / 2) with a length of at least ", table.length, " and R in 2..",
          head_dim);
    check_rows(table.name, tensor);
    aligned = aligned && rows_aligned_16(tensor);
    if (first == nullptr) { first = &table; }
    const Tensor& other = *first->tensor;
    check(
        dtype_of(tensor) == dtype_of(other) && tensor.size(rank - 1) == other.size(other.dim() - 1),
        table.name, " is ", dtype_text(tensor), " with ", Counted{tensor.size(rank - 1), "column"},
        " and ", first->name, " ", dtype_text(other), " with ", other.size(other.dim() - 1),
        "; they must have the same dtype and number of columns");
  }
  check(first != nullptr || !o.rotary_interleaved,
        "`rotary_interleaved` is True and no rotary table is given; leave it at False");
  if (first != nullptr) {
    check(!o.k_rotary_cos || !features.cache.formats.quantised(),
          "`k_rotary_cos` is given and `k` is quantised; rotate keys before they are quantised");
    check(!o.k_rotary_cos || !features.cache.element, "`k_rotary_cos` is given and `k` has dtype ",
          dtype_text(a.k), " and `q` ", dtype_text(a.q), "; rotate keys before they are rounded");
    const Tensor& table = *first->tensor;
    features.rotary = FusedRotary{check_element(first->name, table),
                                  0,  // decode_step sets the first rotated column
                                  static_cast<int>(2 * table.size(table.dim() - 1)),
                                  o.rotary_interleaved,
                                  o.q_rotary_cos.has_value(),
                                  o.k_rotary_cos.has_value(),
                                  aligned};
  }
}

void check_dropout(const FlashFwdArguments& a, FlashFwdFeatures& features) {
  const FlashFwdOptions& o = a.options;
  check(0.0 <= o.dropout_p && o.dropout_p <= 1.0, "`dropout_p` is ", o.dropout_p,
        "; it must be in 0..1");
  features.dropout = o.dropout_p > 0.0;
  check(features.dropout == o.rng_state.has_value(), "`dropout_p` is ", o.dropout_p,
        " and `rng_state` is ", o.rng_state ? "given" : "None",
        "; pass `rng_state` if `dropout_p` > 0, and only then");
  if (o.rng_state) {
    check_operand("rng_state", *o.rng_state, "q", a.q, {ScalarType::Long}, {{2}});
  }
}

// True if a window or the diagonal may hide some key from some query. If only the device knows the
// lengths, the diagonal may be anywhere.
bool hides_keys(const FlashFwdOptions& o, const FlashFwdFeatures& features,
                const FlashFwdCall& call) {
  const bool left = o.window_size_left >= 0;
  const bool right = o.causal || o.window_size_right >= 0;
  if (features.packs_queries() || o.seqused_k) { return left || right; }
  const int64_t offset = o.q_offset.value_or(int64_t{call.kv_length} - call.q_length);
  const int64_t window_right = o.causal ? 0 : o.window_size_right;
  // Tests the first query with the last key, and the last query with key 0. Sizes may be near 2^63.
  return (right && window_right < call.kv_length - 1 - offset) ||
         (left && o.window_size_left < call.q_length - 1 + offset);
}

// Checks that out and softmax_lse have fewer than 2^63 bytes. A q with zero strides may have more.
void check_output_size(const FlashFwdCall& call) {
  const FlashFwdProblem& p = call.problem;
  const double rows = double(call.queries()) * call.heads;
  const double bytes =
      rows * std::max<double>(p.head_dim_v * element_bytes(p.element), sizeof(float));
  check(bytes < static_cast<double>(std::numeric_limits<int64_t>::max()), "`q` has ", rows,
        " rows; out must have fewer than 2^63 bytes");
}

}  // namespace

// Lengths and offsets are below 2^31, so a limit of 2^33 hides no key, and sums fit in 64 bits.
int64_t window_left(const FlashFwdOptions& o) {
  return o.window_size_left < 0 ? NO_WINDOW : std::min(o.window_size_left, int64_t{1} << 33);
}

int64_t window_right(const FlashFwdOptions& o) {
  if (o.causal) { return 0; }
  return o.window_size_right < 0 ? NO_WINDOW : std::min(o.window_size_right, int64_t{1} << 33);
}

std::vector<SeenKeys> seen_keys(const FlashFwdArguments& a, const FlashFwdCall& call) {
  const FlashFwdOptions& o = a.options;
  const int32_t* q_ends = a.packing ? values_on_cpu(a.packing->cu_seqlens_q) : nullptr;
  const int32_t* kv_ends = a.packing ? values_on_cpu(a.packing->cu_seqlens_k) : nullptr;
  const int32_t* used = values_on_cpu(o.seqused_k);
  const int32_t* padding = values_on_cpu(o.leftpad_k);
  std::vector<SeenKeys> seen;
  for (int32_t b = 0; b < call.batch; ++b) {
    const int64_t queries = q_ends ? q_ends[b + 1] - q_ends[b] : call.q_length;
    const int64_t keys = kv_ends ? kv_ends[b + 1] - kv_ends[b] : call.kv_length;
    const int64_t first = padding ? padding[b] : 0;
    SeenKeys range{first, queries == 0 ? 0 : used ? used[b] : keys};
    const int64_t position = o.q_offset.value_or(range.end - queries);
    if (window_left(o) != NO_WINDOW) {
      range.begin = std::max(range.begin, position - window_left(o));
    }
    if (o.attention_chunk > 0 && position > first) {
      const int64_t chunk_begin =
          first + (position - first) / o.attention_chunk * o.attention_chunk;
      range.begin = std::max(range.begin, chunk_begin);
    }
    if (window_right(o) != NO_WINDOW) {
      range.end = std::min(range.end, position + queries + window_right(o));
    }
    seen.push_back(range);
  }
  return seen;
}

FlashFwdCall check_flash_fwd(const FlashFwdArguments& a) {
  FlashFwdCall call{};
  FlashFwdProblem problem{};
  KvFormats formats;
  problem.element = check_operands(a, formats);
  FlashFwdFeatures& features = problem.features;
  call.heads = check_length("q", a.q, 1, "number of heads");
  call.kv_heads = check_length("k", a.k, 1, "number of heads");
  if (a.packing) {
    check_packing(a, call);
    features.varlen = a.packs_keys();
    features.packed_q = !a.packs_keys();
  } else {
    call.batch = check_length("q", a.q, 0, "batch");
    call.q_length = check_length("q", a.q, 2, "length");
    call.kv_length = capacity_of(a, call.batch);
    call.kv_total = call.kv_length;
  }
  problem.head_dim_qk = check_head_dim("q", a.q.size(a.q.dim() - 1), kMaxHeadDimQk);
  problem.head_dim_v = check_head_dim("v", kv_columns(a.v, formats.v), kMaxHeadDimV);
  if (!is_checked(a.cache, call.batch)) { check_scales(a.cache, formats, a.k, a.v, call.batch); }
  features.cache = cache_features(a.cache, formats, problem.element, a.k);
  problem.aligned = rows_aligned(a.k, kv_load_bytes(problem.element, formats.k)) &&
                    rows_aligned(a.v, kv_load_bytes(problem.element, formats.v));
  problem.q_pairs =
      problem.head_dim_qk % 2 == 0 && rows_aligned(a.q, 2 * element_bytes(problem.element));
  problem.q_aligned = rows_aligned_16(a.q);

  const int64_t all_keys = a.packs_keys() ? a.k.size(0) : a.k.size(0) * a.k.size(2);
  problem.keys = call.kv_length < kManyRows ? 0 : a.k.size(1) * all_keys;
  problem.q_length = call.q_length;
  problem.queries_per_kv = call.kv_heads > 0 ? call.heads / call.kv_heads : 1;

  const FlashFwdOptions& o = a.options;
  call.scale = checked_scale(o, problem.head_dim_qk);
  check_numbers(o, call.scale);
  check_lengths("seqused_k", o.seqused_k, a, call);
  check_lengths("leftpad_k", o.leftpad_k, a, call);
  if (a.cache.indexed()) { check_cache_values(a.cache, a.k, seen_keys(a, call)); }
  features.seqused_k = o.seqused_k.has_value();
  features.leftpad_k = o.leftpad_k.has_value();
  features.chunk = o.attention_chunk > 0;
  features.softcap = o.softcap > 0.0;
  check_masks(a, call, features);
  check_score_options(a, call, features);
  check_rotary(a, call, problem.head_dim_qk, features);
  check_dropout(a, features);
  if (a.flex) { features.flex = check_flex(*a.flex, a.q, call); }

  features.band = hides_keys(o, features, call);
  call.problem = problem;
  call.problem.features.long_offsets = reads_long_offsets(a, call);
  check_output_size(call);
  return call;
}

void check_like_out(ArgumentName name, const Tensor& tensor, const FlashFwdArguments& f) {
  Dims sizes = sizes_of(f.q);
  sizes.back() = f.v.size(f.v.dim() - 1);
  check_same_device(name, tensor, "q", f.q);
  check_same_dtype(name, tensor, "q", f.q);
  check_shape(name, tensor, {sizes});
  check_rows(name, tensor);
}

void check_statistics(ArgumentName name, const Tensor& tensor, const FlashFwdArguments& f) {
  check_statistics(name, tensor, "q", f.q, lse_sizes(f.q));
}

}  // namespace metal_attn
