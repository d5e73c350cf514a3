#include "csrc/ops/cache_options.h"

#include "csrc/ops/checks.h"

namespace metal_attn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// Rows of a page are staged in pairs and in blocks, both of which must lie in it whole.
constexpr int64_t kPageMultiple = 8;

void check_block_table(const Tensor& table, const Tensor& k, const Tensor& q, int32_t batch) {
  check_device("block_table", table);
  check_same_device("block_table", table, "q", q);
  check_known_dtype("block_table", table, "int32");
  check(table.scalar_type() == ScalarType::Int, "block_table has dtype ", dtype_text(table),
        "; it must be int32");
  check(table.dim() == 2 && table.size(0) == batch, "block_table has shape ", shape_text(table),
        "; it must be (", batch, ", max_blocks)");
  check_last_stride("block_table", table);
  check_storage("block_table", table);
  const int64_t page = k.size(2);
  check(page >= kPageMultiple && page % kPageMultiple == 0, "k has pages of ", page,
        " keys; with block_table they must be a multiple of ", kPageMultiple);
  check(table.size(1) <= kMaxLength / page, "block_table has ", table.size(1), " pages of ", page,
        " keys a sequence; together they must be at most ", kMaxLength, " keys");
}

}  // namespace

const char* cache_layout(const CacheOptions& o) {
  return o.block_table ? "(pages, kv_heads, page, head_dim)"
                       : "(cache_batch, kv_heads, kv_length, head_dim)";
}

int32_t check_cache_capacity(const CacheOptions& o, const Tensor& k, const Tensor& q,
                             int32_t batch) {
  check(!(o.block_table && o.cache_batch_idx),
        "cache_batch_idx is given with block_table, which says already where each sequence is; "
        "give one of them");
  check_length("k", k, 0, o.block_table ? "number of pages" : "batch");
  if (o.block_table) {
    check_block_table(*o.block_table, k, q, batch);
    return static_cast<int32_t>(o.block_table->size(1) * k.size(2));
  }
  if (o.cache_batch_idx) {
    check_device("cache_batch_idx", *o.cache_batch_idx);
    check_same_device("cache_batch_idx", *o.cache_batch_idx, "q", q);
    check_index("cache_batch_idx", *o.cache_batch_idx);
    check_shape("cache_batch_idx", *o.cache_batch_idx, {{batch}});
  }
  return check_length("k", k, 2, "length");
}

void check_cache_values(const CacheOptions& o, const Tensor& k, const std::vector<SeenKeys>& seen) {
  const int64_t size = k.size(0);
  const int64_t batch = static_cast<int64_t>(seen.size());
  if (const int32_t* indices = o.cache_batch_idx ? values_on_cpu(*o.cache_batch_idx) : nullptr) {
    for (int64_t b = 0; b < batch; ++b) {
      check(0 <= indices[b] && indices[b] < size, "cache_batch_idx[", b, "] is ", indices[b],
            "; it must be in 0..", size - 1, ", the batch of k");
    }
  }
  if (const int32_t* pages = o.block_table ? values_on_cpu(*o.block_table) : nullptr) {
    const int64_t page = k.size(2);
    for (int64_t b = 0; b < batch; ++b) {
      const int32_t* row = pages + b * o.block_table->stride(0);
      const SeenKeys& keys = seen[static_cast<std::size_t>(b)];
      for (int64_t place = keys.begin / page; place * page < keys.end; ++place) {
        check(0 <= row[place] && row[place] < size, "block_table[", b, ", ", place, "] is ",
              row[place], "; it must be in 0..", size - 1, ", the pages of k");
      }
    }
  }
}

CacheFeatures cache_features(const CacheOptions& o, const Tensor& k) {
  CacheFeatures features{};
  features.page_size = o.block_table ? static_cast<int>(k.size(2)) : 0;
  features.batch_idx = o.cache_batch_idx.has_value();
  return features;
}

void fill_cache_params(const CacheOptions& o, const Tensor& k, FlashParams& params) {
  if (o.indexed()) {
    params.cache_size = static_cast<int32_t>(k.size(0));
  }
  if (o.block_table) {
    params.block_table_stride = o.block_table->stride(0);
  }
}

}  // namespace metal_attn
