// The checks of a cache's arguments, for ops that read or write it.
#pragma once

#include <vector>

#include "csrc/problem/cache.h"

struct FlashParams;

namespace metal_attn {

// The formats of k and v. Checks that dtypes and scales fit together.
KvFormats check_kv_formats(const CacheOptions& options, const Tensor& q, const Tensor& k,
                           const Tensor& v);

// True if each row has scales, which are written with it.
inline bool has_row_scales(KvFormat format) { return kv_row_scales(static_cast<int>(format)); }

// Convert between the head dim of k or v and the last size of the tensor.
int64_t kv_last_size(int64_t columns, KvFormat format);
int64_t kv_columns(const Tensor& tensor, KvFormat format);

void check_scales(const CacheOptions& options, KvFormats formats, const Tensor& k, const Tensor& v,
                  int32_t batch);

int check_hadamard(int64_t hadamard, const CacheNames& names, KvFormats formats, int64_t columns,
                   int64_t v_columns);

// The layout of k or v in messages.
const char* cache_layout(const CacheOptions& options);

// Checks the shapes of the options. Returns the most keys of a sequence. batch: the batch of q.
int32_t check_cache_capacity(const CacheOptions& options, const Tensor& k, const Tensor& q,
                             int32_t batch);

// Checks the values of indices if they are on the CPU. seen: one range of keys for each sequence.
void check_cache_values(const CacheOptions& options, const Tensor& k,
                        const std::vector<SeenKeys>& seen);

// Rows [begin, end) of a batch or a page, which hold keys of a sequence.
struct CachedRows {
  int64_t place;  // the batch or the page
  int64_t begin;
  int64_t end;
  int64_t sequence;
};

// The rows of each sequence's keys. The indices must be on the CPU.
std::vector<CachedRows> cached_rows(const CacheOptions& options, int64_t page_size,
                                    const std::vector<SeenKeys>& keys);

// "page " or "batch ", for CachedRows::place.
const char* place_text(const CacheOptions& options);

// The element of k and v if it differs from q's element and k and v are not quantised.
std::optional<Element> differing_element(KvFormats formats, Element q_element, const Tensor& k);

CacheFeatures cache_features(const CacheOptions& options, KvFormats formats, Element q_element,
                             const Tensor& k);

// True if v is the first columns of k, as in the latent caches of DeepSeek's MLA. Then one read or
// write serves both.
bool v_in_k(const CacheOptions& options, KvFormats formats, const Tensor& k, const Tensor& v);

// True if `part` is a view of the first columns of `whole`.
bool has_leading_columns(const Tensor& whole, const Tensor& part);

RowStrides scale_strides(const OptionalTensor& scale);

void fill_cache_params(const CacheOptions& options, const Tensor& k, FlashParams& params);

}  // namespace metal_attn
