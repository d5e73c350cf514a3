#include "csrc/ops/decode/tree.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/check.h"

namespace metal_attn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// As many as a row of the kernel has bits for.
constexpr int64_t kMostTokens = 64;

// One sequence's tokens: where its first is in packed rows, and how many there are.
struct Tokens {
  int64_t sequence;
  int64_t first;
  int64_t count;
};

std::vector<Tokens> tokens_of(const FlashFwdArguments& f, const FlashFwdCall& call) {
  const int32_t* ends = f.packing ? values_on_cpu(f.packing->cu_seqlens_q) : nullptr;
  std::vector<Tokens> all;
  for (int64_t b = 0; b < call.batch; ++b) {
    all.push_back(ends != nullptr ? Tokens{b, ends[b], ends[b + 1] - ends[b]}
                                  : Tokens{b, 0, call.q_length});
  }
  return all;
}

void check_parents(const Tensor& parents, const Tokens& tokens) {
  const int64_t first = parents.dim() == 2 ? tokens.sequence * parents.stride(0) : tokens.first;
  const int32_t* own = values_on_cpu(parents) + first;
  for (int64_t i = 0; i < tokens.count; ++i) {
    check(-1 <= own[i] && own[i] < i, "`parents` of token ", i, " of sequence ", tokens.sequence,
          " is ", own[i], "; it must be -1 or an earlier token of the sequence");
  }
}

void check_mask(const Tensor& mask, const Tokens& tokens) {
  const int64_t row = mask.stride(mask.dim() - 2);
  const int64_t first = mask.dim() == 3 ? tokens.sequence * mask.stride(0) : tokens.first * row;
  const auto* shown = static_cast<const uint8_t*>(mask.const_data_ptr()) + first;
  for (int64_t i = 0; i < tokens.count; ++i) {
    check(shown[i * row + i] != 0, "`tree_mask` of token ", i, " of sequence ", tokens.sequence,
          " does not show it to itself; the diagonal must be True");
  }
}

// The tokens are the sequence's last keys.
void check_keys(const FlashFwdArguments& f, const FlashFwdCall& call, const Tokens& tokens) {
  const auto values = [](const OptionalTensor& lengths) {
    return lengths ? values_on_cpu(*lengths) : nullptr;
  };
  const int32_t* used = values(f.options.seqused_k);
  const int32_t* padding = values(f.options.leftpad_k);
  if ((f.options.seqused_k && used == nullptr) || (f.options.leftpad_k && padding == nullptr)) {
    return;
  }
  const int64_t keys = used != nullptr ? used[tokens.sequence] : call.kv_length;
  const int64_t first = padding != nullptr ? padding[tokens.sequence] : 0;
  check(tokens.count <= keys - first, "sequence ", tokens.sequence, " has ", tokens.count,
        " queries and ", keys - first,
        " keys; with `parents` or `tree_mask` its last keys are "
        "those of the queries");
}

}  // namespace

void check_tree(const FlashDecodeArguments& a, FlashFwdCall& call) {
  const DecodeOptions& o = a.options;
  if (!o.has_tree()) {
    return;
  }
  const FlashFwdArguments& f = a.forward;
  check(!o.parents || !o.tree_mask, "`parents` and `tree_mask` are given; give one of them");
  const ArgumentName name = o.parents ? "parents" : "tree_mask";
  const Tensor& tree = o.parents ? *o.parents : *o.tree_mask;
  check_same_device(name, tree, "q", f.q);
  check_dtype(name, tree, o.parents ? ScalarType::Int : ScalarType::Bool);
  const int64_t batch = call.batch;
  const int64_t length = call.q_length;
  if (f.packing) {
    const Dims packed = o.parents ? Dims{call.q_total} : Dims{call.q_total, length};
    check_shape(name, tree, {packed});
  } else {
    const Dims shared = o.parents ? Dims{length} : Dims{length, length};
    const Dims each = o.parents ? Dims{batch, length} : Dims{batch, length, length};
    check_shape(name, tree, {shared, each});
  }
  check_last_stride(name, tree);
  check_storage(name, tree);
  check(length <= kMostTokens, name, " is given and a sequence has ", length,
        " queries; a tree has at most ", kMostTokens);
  check(!f.options.q_offset, "`q_offset` is given with ", name,
        ", whose queries are those of the last keys");
  check(!f.options.alibi_slopes, "`alibi_slopes` is given with ", name,
        "; flash_decode has no slopes for trees");
  if (tree.is_cpu() && tree.numel() > 0) {
    for (const Tokens& tokens : tokens_of(f, call)) {
      check_keys(f, call, tokens);
      o.parents ? check_parents(tree, tokens) : check_mask(tree, tokens);
    }
  }
  FlashFwdFeatures& features = call.problem.features;
  features.tree_parents = o.parents.has_value();
  features.tree_mask = o.tree_mask.has_value();
  // The tree says which tokens after a query it does not see.
  features.band = f.options.window_size_left >= 0;
}

}  // namespace metal_attn
