#include "csrc/ops/decode/visible.h"

#include "csrc/ops/attention/flex.h"

namespace metal_attn {
namespace {

constexpr int64_t kLargestBlock = 128;

void check_block_sizes(const KeyLists& a) {
  check(1 <= a.kv_block_size && a.kv_block_size <= kLargestBlock, "`kv_block_size` is ",
        a.kv_block_size, "; it must be in 1..", kLargestBlock, ", and 1 if keys are listed");
  check(1 <= a.q_block_size && a.q_block_size <= kMaxLength, "`q_block_size` is ", a.q_block_size,
        "; it must be in 1..", kMaxLength, ", and 1 if each query has a list");
}

// Refuses options for which the keys of a tile must be neighbours.
void check_options(const FlashFwdOptions& o) {
  for (const auto& [name, option] : {std::pair{ArgumentName("attn_mask"), &o.attn_mask},
                                     {"attn_bias", &o.attn_bias},
                                     {"alibi_slopes", &o.alibi_slopes}}) {
    check(!*option, name,
          " is given with `indices`, which do not support it: leave hidden keys out of the lists");
  }
}

// Checks that entries on the CPU are in range.
void check_entries(const Tensor& indices, int64_t blocks) {
  const int32_t* const values = values_on_cpu(indices);
  if (values == nullptr) { return; }
  for (int64_t b = 0; b < indices.size(0); ++b) {
    for (int64_t h = 0; h < indices.size(1); ++h) {
      for (int64_t list = 0; list < indices.size(2); ++list) {
        const int32_t* entry =
            values + b * indices.stride(0) + h * indices.stride(1) + list * indices.stride(2);
        for (int64_t i = 0; i < indices.size(3); ++i, entry += indices.stride(3)) {
          check(-1 <= *entry && *entry < blocks, "`indices`[", b, ", ", h, ", ", list, ", ", i,
                "] is ", *entry, "; it must be in 0..", blocks - 1, ", or -1 for no entry");
        }
      }
    }
  }
}

}  // namespace

void check_indices(const KeyLists& a, const FlashFwdArguments& f, const FlashFwdCall& call) {
  if (!a.indices) {
    check(a.kv_block_size == 1 && a.q_block_size == 1, "`kv_block_size` is ", a.kv_block_size,
          " and `q_block_size` ", a.q_block_size, " without `indices`; leave them at 1");
    return;
  }
  const Tensor& indices = *a.indices;
  check_block_sizes(a);
  check_options(f.options);
  check_same_device("indices", indices, "q", f.q);
  check_dtype("indices", indices, {ScalarType::Int});
  check(!f.packing || a.q_block_size == 1, "`q_block_size` is ", a.q_block_size,
        " with `cu_seqlens_q`; it must be 1, because each packed query has a list");
  const int64_t batch = f.packing ? 1 : call.batch;
  const int64_t queries = f.packing ? call.q_total : call.q_length;
  const int64_t lists = divide_up(queries, a.q_block_size);
  check(indices.dim() == 4 && (indices.size(0) == 1 || indices.size(0) == batch) &&
            (indices.size(1) == 1 || indices.size(1) == call.kv_heads) && indices.size(2) == lists,
        "`indices` has shape ", shape_text(indices), "; it must be (1 or ", batch, ", 1 or ",
        call.kv_heads, ", ", lists, ", entries), with a list for every ",
        Counted{a.q_block_size, "query"});
  check(indices.size(3) <= kMaxLength / a.kv_block_size, "`indices` has lists of ",
        Counted{indices.size(3), "block"}, " of ", Counted{a.kv_block_size, "key"},
        "; a list may have at most ", kMaxLength, " keys");
  check_storage("indices", indices);
  check_entries(indices, divide_up(call.kv_length, a.kv_block_size));
}

int64_t listed_keys(const KeyLists& a) { return a.indices->size(3) * a.kv_block_size; }

void fill_list_params(const KeyLists& a, const FlashFwdCall& call, FlexParams& params) {
  params.partial = block_list_params(std::nullopt, *a.indices);
  params.existing_blocks = static_cast<int32_t>(divide_up(call.kv_length, a.kv_block_size));
}

std::string describe_indices(const KeyLists& a, const FlashFwdCall& call) {
  if (!a.indices) { return ""; }
  const std::string text =
      text_of("; keys come from ", Counted{divide_up(call.q_length, a.q_block_size), "list"},
              " with up to ", Counted{a.indices->size(3), "entry"});
  return a.kv_block_size == 1 ? text : text_of(text, ": blocks of ", a.kv_block_size, " keys");
}

}  // namespace metal_attn
