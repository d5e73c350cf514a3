#include "csrc/ops/cache/check.h"

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/check.h"
#include "csrc/problem/strides.h"
#include "shaders/params/attention.h"

namespace metal_attn {

namespace {

constexpr char kKvNames[] =
    "float32, float16 or bfloat16, or int8, uint8, int16, int32 or float8_e4m3fn with a scale";

struct QuantisedOperand {
  ArgumentName name;
  const Tensor& data;
  ArgumentName scale_name;
  const OptionalTensor& scale;
  KvFormat format;
};

std::array<QuantisedOperand, 2> quantised_operands(const CacheOptions& o, const Tensor& k,
                                                   const Tensor& v, KvFormats formats = {}) {
  return {{{o.names.k, k, "k_scale", o.k_scale, formats.k},
           {o.names.v, v, "v_scale", o.v_scale, formats.v}}};
}

int64_t last_size(const Tensor& tensor) {
  return tensor.dim() == 0 ? 0 : tensor.size(tensor.dim() - 1);
}

// The grouped format with `bits` bits. A group of 64 has 8 units of 8 codes and 2 scale numbers.
KvFormat grouped(int bits, const QuantisedOperand& operand) {
  const int64_t units = last_size(operand.data) / (bits == 3 ? 3 : 1);
  const int group = units > 0 && units == 4 * last_size(*operand.scale) ? 64 : 32;
  return static_cast<KvFormat>(KV_GROUPED(bits, group));
}

// q4_0 has 16 bytes per scale. q3_g32 has 6 bytes per number in the scale tensor, and q3_g64 12.
bool has_3_bits(const QuantisedOperand& operand) {
  const int64_t bytes = last_size(operand.data);
  const int64_t numbers = last_size(*operand.scale);
  return bytes > 0 && (bytes == 6 * numbers || bytes == 12 * numbers);
}

// k and v must have q's dtype, or half precision if q has float32.
void check_stored_dtype(ArgumentName name, const Tensor& data, ArgumentName q_name,
                        const Tensor& q) {
  const ScalarType dtype = dtype_of(data);
  if (dtype_of(q) != ScalarType::Float) {
    check_same_dtype(name, data, q_name, q);
    return;
  }
  check(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
        name, " has dtype ", dtype_text(data), " and ", q_name, " float32; it must be ", kKvNames);
}

KvFormat format_of(const QuantisedOperand& operand, ArgumentName q_name, const Tensor& q) {
  const auto& [name, data, scale_name, scale, unset_format] = operand;
  check_known_dtype(name, data, kKvNames);
  std::optional<ScalarType> scale_dtype;
  if (scale) {
    check_same_device(scale_name, *scale, q_name, q);
    check_known_dtype(scale_name, *scale, "float16 or float32");
    scale_dtype = dtype_of(*scale);
  }
  const char* allowed = "";
  switch (dtype_of(data)) {
    case ScalarType::Char:
      if (scale_dtype == ScalarType::Half) { return KvFormat::kQ8_0; }
      allowed = "float16 (q8_0)";
      break;
    case ScalarType::Byte:
      if (scale_dtype == ScalarType::Half) {
        return has_3_bits(operand) ? grouped(3, operand) : KvFormat::kQ4_0;
      }
      if (scale_dtype == ScalarType::Float) { return KvFormat::kFp8E4m3; }
      allowed = "float16 (q4_0, q3_g32 or q3_g64) or float32 (fp8_e4m3)";
      break;
    case ScalarType::Short:
      if (scale_dtype == ScalarType::Half) { return grouped(2, operand); }
      allowed = "float16 (q2_g32 or q2_g64)";
      break;
    case ScalarType::Int:
      if (scale_dtype == ScalarType::Half) { return grouped(4, operand); }
      allowed = "float16 (q4_g32 or q4_g64)";
      break;
    case ScalarType::Float8_e4m3fn:
      if (!scale_dtype || scale_dtype == ScalarType::Float) { return KvFormat::kFp8E4m3; }
      allowed = "float32 (fp8_e4m3) or None";
      break;
    default:
      check_stored_dtype(name, data, q_name, q);
      check(!scale, scale_name, " is given and ", name, " has dtype ", dtype_text(data),
            "; only int8, uint8, int16, int32 and float8_e4m3fn have scales");
      return KvFormat::kPlain;
  }
  check(false, name, " has dtype ", dtype_text(data), " and ", scale_name, " is ",
        scale ? dtype_text(*scale).str() : "None", "; it must be ", allowed);
  return KvFormat::kPlain;
}

void check_block_table(const CacheOptions& o, const Tensor& k, const Tensor& q, int32_t batch) {
  const Tensor& table = *o.block_table;
  check_same_device("block_table", table, o.names.q, q);
  check_dtype("block_table", table, {ScalarType::Int});
  check(table.dim() == 2 && table.size(0) == batch, "`block_table` has shape ", shape_text(table),
        "; it must be (", batch, ", max_blocks)");
  check_rows("block_table", table);
  const int32_t page = check_length(o.names.k, k, 2, "page size");
  check(page > 0, ArgumentName(o.names.k),
        " has a page size of 0; with `block_table` it must be at least 1");
  check(table.size(1) <= kMaxLength / page, "`block_table` has ", Counted{table.size(1), "page"},
        " of ", Counted{page, "key"}, " per sequence; a sequence may have at most ", kMaxLength,
        " keys");
}

}  // namespace

KvFormats check_kv_formats(const CacheOptions& o, const Tensor& q, const Tensor& k,
                           const Tensor& v) {
  const auto [k_operand, v_operand] = quantised_operands(o, k, v);
  const KvFormats formats{format_of(k_operand, o.names.q, q), format_of(v_operand, o.names.q, q)};
  check((formats.k == KvFormat::kPlain) == (formats.v == KvFormat::kPlain), v_operand.name, " is ",
        format_name(formats.v), " and ", k_operand.name, " is ", format_name(formats.k),
        "; both or neither must be quantised");
  if (!formats.quantised()) { check_same_dtype(v_operand.name, v, k_operand.name, k); }
  return formats;
}

int64_t kv_last_size(int64_t columns, KvFormat kv_format) {
  const int format = static_cast<int>(kv_format);
  if (kv_grouped(format)) { return kv_bits(format) == 3 ? columns * 3 / 8 : columns / 8; }
  return kv_format == KvFormat::kPlain ? columns : columns * kv_bits(format) / 8;
}

int64_t kv_columns(const Tensor& tensor, KvFormat kv_format) {
  const int64_t size = tensor.size(tensor.dim() - 1);
  const int format = static_cast<int>(kv_format);
  if (kv_grouped(format)) { return kv_bits(format) == 3 ? size * 8 / 3 : size * 8; }
  return kv_format == KvFormat::kPlain ? size : size * 8 / kv_bits(format);
}

void check_scales(const CacheOptions& o, KvFormats formats, const Tensor& k, const Tensor& v,
                  int32_t batch) {
  for (const auto& [name, data, scale_name, scale, format] : quantised_operands(o, k, v, formats)) {
    if (!scale) { continue; }
    if (format == KvFormat::kFp8E4m3) {
      check_shape(scale_name, *scale, {{data.size(1)}, {batch, data.size(1)}});
      check_storage(scale_name, *scale);
    } else {
      const int64_t columns = kv_columns(data, format);
      const int shared = kv_scale_columns(static_cast<int>(format));
      check(columns % shared == 0, name, " has a head dim of ", columns, "; ", format_name(format),
            " needs a multiple of ", shared);
      Dims shape = sizes_of(data);
      shape.back() = columns / shared * kv_scale_numbers(static_cast<int>(format));
      check_shape(scale_name, *scale, {shape});
      check_rows(scale_name, *scale);
    }
  }
}

int check_hadamard(int64_t hadamard, const CacheNames& names, KvFormats formats, int64_t columns,
                   int64_t v_columns) {
  if (hadamard == 0) { return 0; }
  check(hadamard == 32 || hadamard == 64 || hadamard == 128, "`hadamard` is ", hadamard,
        "; it must be 0 (off), 32, 64 or 128");
  check(formats.quantised(), "`hadamard` is ", hadamard, " and ", ArgumentName(names.k),
        " is not quantised; only rows that are quantised are rotated");
  for (const auto& [name, size] : {std::pair{names.k, columns}, {names.v, v_columns}}) {
    check(size % hadamard == 0, ArgumentName(name), " has a head dim of ", size,
          "; it must be a multiple of `hadamard`, which is ", hadamard);
  }
  return static_cast<int>(hadamard);
}

const char* cache_layout(const CacheOptions& o) {
  return o.block_table ? "(pages, kv_heads, page, head_dim)"
                       : "(cache_batch, kv_heads, kv_length, head_dim)";
}

int32_t check_cache_capacity(const CacheOptions& o, const Tensor& k, const Tensor& q,
                             int32_t batch) {
  check(!(o.block_table && o.cache_batch_idx),
        "`cache_batch_idx` is given with `block_table`, which already selects the rows of each "
        "sequence; give one of them");
  check_length(o.names.k, k, 0, o.block_table ? "number of pages" : "batch");
  if (o.block_table) {
    check_block_table(o, k, q, batch);
    return static_cast<int32_t>(o.block_table->size(1) * k.size(2));
  }
  if (o.cache_batch_idx) {
    check_index("cache_batch_idx", *o.cache_batch_idx, o.names.q, q);
    check_shape("cache_batch_idx", *o.cache_batch_idx, {{batch}});
  }
  return check_length(o.names.k, k, 2, "length");
}

void check_cache_values(const CacheOptions& o, const Tensor& k, const std::vector<SeenKeys>& seen) {
  const int64_t size = k.size(0);
  const int64_t batch = static_cast<int64_t>(seen.size());
  if (const int32_t* indices = values_on_cpu(o.cache_batch_idx)) {
    for (int64_t b = 0; b < batch; ++b) {
      check(0 <= indices[b] && indices[b] < size, "`cache_batch_idx`[", b, "] is ", indices[b],
            "; it must be in 0..", size - 1, ": the batch of ", ArgumentName(o.names.k), " is ",
            size);
    }
  }
  if (const int32_t* pages = values_on_cpu(o.block_table)) {
    const int64_t page = k.size(2);
    for (int64_t b = 0; b < batch; ++b) {
      const int32_t* row = pages + b * o.block_table->stride(0);
      const SeenKeys& keys = seen[static_cast<std::size_t>(b)];
      for (int64_t place = keys.begin / page; place * page < keys.end; ++place) {
        check(0 <= row[place] && row[place] < size, "`block_table`[", b, ", ", place, "] is ",
              row[place], "; it must be in 0..", size - 1, ", because ", ArgumentName(o.names.k),
              " has ", Counted{size, "page"});
      }
    }
  }
}

std::vector<CachedRows> cached_rows(const CacheOptions& o, int64_t page_size,
                                    const std::vector<SeenKeys>& keys) {
  const int32_t* const batches = values_on_cpu(o.cache_batch_idx);
  std::vector<CachedRows> rows;
  for (int64_t b = 0; b < static_cast<int64_t>(keys.size()); ++b) {
    const auto [begin, end] = keys[static_cast<std::size_t>(b)];
    if (begin >= end) { continue; }
    if (!o.block_table) {
      rows.push_back({batches != nullptr ? batches[b] : b, begin, end, b});
      continue;
    }
    const int32_t* pages = values_on_cpu(*o.block_table) + b * o.block_table->stride(0);
    for (int64_t block = begin / page_size; block * page_size < end; ++block) {
      const int64_t first = block * page_size;
      rows.push_back({pages[block], std::max<int64_t>(begin - first, 0),
                      std::min<int64_t>(end - first, page_size), b});
    }
  }
  return rows;
}

const char* place_text(const CacheOptions& o) { return o.block_table ? "page " : "batch "; }

std::optional<Element> differing_element(KvFormats formats, Element q_element, const Tensor& k) {
  if (formats.quantised()) { return std::nullopt; }
  const Element element = check_element("k", k);
  return element == q_element ? std::nullopt : std::optional(element);
}

CacheFeatures cache_features(const CacheOptions& o, KvFormats formats, Element q_element,
                             const Tensor& k) {
  CacheFeatures features{};
  features.element = differing_element(formats, q_element, k);
  features.page_size = o.block_table ? static_cast<int>(k.size(2)) : 0;
  features.batch_idx = o.cache_batch_idx.has_value();
  features.formats = formats;
  features.k_scale = o.k_scale.has_value();
  features.v_scale = o.v_scale.has_value();
  return features;
}

bool has_leading_columns(const Tensor& whole, const Tensor& part) {
  const int64_t last = part.dim() - 1;
  // Fake tensors have no address.
  bool same = part.numel() > 0 && part.const_data_ptr() != nullptr &&
              part.const_data_ptr() == whole.const_data_ptr() && part.dim() == whole.dim() &&
              part.size(last) <= whole.size(last);
  for (int64_t dim = 0; same && dim <= last; ++dim) {
    same = part.stride(dim) == whole.stride(dim) || (dim == last && part.size(dim) == 1);
  }
  return same;
}

bool v_in_k(const CacheOptions& o, KvFormats formats, const Tensor& k, const Tensor& v) {
  // A missing scale is 1, so the scales differ if only one is missing.
  const bool scaled = o.k_scale && o.v_scale;
  const bool same_scale =
      scaled ? has_leading_columns(*o.k_scale, *o.v_scale) : !o.k_scale && !o.v_scale;
  return formats.k == formats.v && has_leading_columns(k, v) && same_scale;
}

RowStrides scale_strides(const OptionalTensor& scale) {
  if (!scale) { return {}; }
  if (scale->dim() < 3) {
    return {scale->dim() == 2 ? scale->stride(0) : 0, scale->stride(scale->dim() - 1), 0};
  }
  return row_strides(*scale);
}

void fill_cache_params(const CacheOptions& o, const Tensor& k, FlashParams& params) {
  if (o.indexed()) { params.cache_size = static_cast<int32_t>(k.size(0)); }
  if (o.block_table) { params.block_table_stride = o.block_table->stride(0); }
  params.k_scale_strides = scale_strides(o.k_scale);
  params.v_scale_strides = scale_strides(o.v_scale);
}

}  // namespace metal_attn
