// K and V that outlive a call: what ops that read a cache are told of it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "csrc/ops/attention/choose.h"
#include "csrc/runtime/launch.h"
#include "shaders/params.h"

// In the order of CacheOptions.
#define FLASH_CACHE_OPTIONS                                  \
  "Tensor? block_table=None, Tensor? cache_batch_idx=None, " \
  "Tensor? k_scale=None, Tensor? v_scale=None"

namespace metal_attn {

// What messages call the tensors that the options are about.
struct CacheNames {
  const char* q = "q";
  const char* k = "k";
  const char* v = "v";
};

// What each means is in torch_metal_attn/reference.py, `cached`, and quantisation.py.
struct CacheOptions {
  using OptionalTensor = std::optional<torch::stable::Tensor>;
  OptionalTensor block_table;
  OptionalTensor cache_batch_idx;
  OptionalTensor k_scale;
  OptionalTensor v_scale;
  CacheNames names = {};

  // Whether k and v hold more than this call's keys: then they have 4 dimensions, and a batch of
  // their own, even if q is packed.
  bool indexed() const { return block_table || cache_batch_idx; }
};

// The keys that some query of a sequence may see: [begin, end).
struct SeenKeys {
  int64_t begin;
  int64_t end;
};

// What the dtypes of k and v and of their scales tell, and whether they may be together.
KvFormat check_kv_format(const CacheOptions& options, const torch::stable::Tensor& q,
                         const torch::stable::Tensor& k, const torch::stable::Tensor& v);

// Columns of k or v.
int64_t kv_columns(const torch::stable::Tensor& tensor, KvFormat format);

// Shapes and memory of the scales.
void check_scales(const CacheOptions& options, KvFormat format, const torch::stable::Tensor& k,
                  const torch::stable::Tensor& v, int32_t batch);

// The layout of k or v in messages.
const char* cache_layout(const CacheOptions& options);

// The keys that a sequence may have, after the shapes of the options were checked. `batch`: of q.
int32_t check_cache_capacity(const CacheOptions& options, const torch::stable::Tensor& k,
                             const torch::stable::Tensor& q, int32_t batch);

// The strides of a scale, by block or by head.
RowStrides scale_strides(const std::optional<torch::stable::Tensor>& scale);

// Values that are at hand: on mps the kernel checks them. `seen`: one a sequence.
void check_cache_values(const CacheOptions& options, const torch::stable::Tensor& k,
                        const std::vector<SeenKeys>& seen);

// The element of k and v, unless they are quantised or it is q's.
std::optional<Element> own_element(KvFormat format, Element q_element,
                                   const torch::stable::Tensor& k);

CacheFeatures cache_features(const CacheOptions& options, KvFormat format, Element q_element,
                             const torch::stable::Tensor& k);

// The fields of `params` that are the options'.
void fill_cache_params(const CacheOptions& options, const torch::stable::Tensor& k,
                       FlashParams& params);

}  // namespace metal_attn
