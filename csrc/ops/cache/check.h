// Checks of a cache's arguments, for the ops that read or write it.
#pragma once

#include <vector>

#include "csrc/problem/cache.h"

struct FlashParams;

namespace metal_attn {

// The formats of k and v, from their dtypes and those of their scales, which must fit together.
KvFormats check_kv_formats(const CacheOptions& options, const Tensor& q, const Tensor& k,
                           const Tensor& v);

// True if a row has scales of its own, which are written with it.
inline bool has_row_scales(KvFormat format) { return kv_row_scales(static_cast<int>(format)); }

// The last size of k or v with so many columns.
int64_t kv_last_size(int64_t columns, KvFormat format);

// Columns of k or v.
int64_t kv_columns(const Tensor& tensor, KvFormat format);

// Shapes and memory of the scales.
void check_scales(const CacheOptions& options, KvFormats formats, const Tensor& k, const Tensor& v,
                  int32_t batch);

// Checks `hadamard`, alike for all ops that have it.
int check_hadamard(int64_t hadamard, const CacheNames& names, KvFormats formats, int64_t columns,
                   int64_t v_columns);

// The layout of k or v in messages.
const char* cache_layout(const CacheOptions& options);

// The keys that a sequence may have, after the shapes of the options were checked. `batch`: of q.
int32_t check_cache_capacity(const CacheOptions& options, const Tensor& k, const Tensor& q,
                             int32_t batch);

// Checks values that the host can read: on mps the kernel checks them. `seen`: one a sequence.
void check_cache_values(const CacheOptions& options, const Tensor& k,
                        const std::vector<SeenKeys>& seen);

// Neighbouring rows of one batch or page, in which a sequence has keys.
struct CachedRows {
  int64_t place;
  int64_t begin;
  int64_t end;
  int64_t sequence;
};

// The places of each sequence's keys, by values that the host can read.
std::vector<CachedRows> cached_rows(const CacheOptions& options, int64_t page_size,
                                    const std::vector<SeenKeys>& keys);

// "page " or "batch ": what CachedRows calls a place.
const char* place_text(const CacheOptions& options);

// The element of k and v, unless they are quantised or it is q's.
std::optional<Element> own_element(KvFormats formats, Element q_element, const Tensor& k);

CacheFeatures cache_features(const CacheOptions& options, KvFormats formats, Element q_element,
                             const Tensor& k);

// True if v's rows are the first columns of k's, as in the latent caches of DeepSeek's MLA, so that
// one read or write serves both.
bool v_in_k(const CacheOptions& options, KvFormats formats, const Tensor& k, const Tensor& v);

// True if two tensors begin at one element and step alike, the second no wider.
bool begins(const Tensor& whole, const Tensor& part);

RowStrides scale_strides(const OptionalTensor& scale);

// The fields of `params` that are the options'.
void fill_cache_params(const CacheOptions& options, const Tensor& k, FlashParams& params);

}  // namespace metal_attn
