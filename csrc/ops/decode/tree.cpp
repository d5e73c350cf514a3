#include "csrc/ops/decode/visible.h"

#include "csrc/ops/common/allocate.h"
#include "csrc/ops/common/check.h"

namespace metal_attn {
namespace {

// The tokens of a sequence.
struct Tokens {
  int64_t sequence;
  int64_t first;  // index of the first token in packed rows, or 0
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

// The name of a token in messages.
std::string token_text(int64_t token, const Tokens& tokens) {
  return text_of("token ", token, " of sequence ", tokens.sequence);
}

void check_parents(const Tensor& parents, const Tokens& tokens) {
  const int64_t first = parents.dim() == 2 ? tokens.sequence * parents.stride(0) : tokens.first;
  const int32_t* parent = values_on_cpu(parents) + first;
  for (int64_t i = 0; i < tokens.count; ++i) {
    check(-1 <= parent[i] && parent[i] < i, "`parents` is ", parent[i], " for ",
          token_text(i, tokens),
          "; it must be an earlier token of the sequence, or -1 (no parent)");
  }
}

// Checks that the mask is a forest. A token's parent is the last earlier token that it sees. It
// sees itself and the tokens that its parent sees.
void check_mask(const Tensor& mask, const Tokens& tokens) {
  const int64_t row = mask.stride(mask.dim() - 2);
  const int64_t first = mask.dim() == 3 ? tokens.sequence * mask.stride(0) : tokens.first * row;
  const auto* all = static_cast<const uint8_t*>(mask.const_data_ptr()) + first;
  for (int64_t i = 0; i < tokens.count; ++i) {
    const auto* shown = all + i * row;
    check(shown[i] != 0, "`tree_mask` hides ", token_text(i, tokens),
          " from itself; the diagonal must be True");
    for (int64_t j = i + 1; j < tokens.count; ++j) {
      check(shown[j] == 0, "`tree_mask` shows token ", j, " to ", token_text(i, tokens),
            "; a token may see only itself and earlier tokens");
    }
    int64_t parent = i - 1;
    while (parent >= 0 && shown[parent] == 0) { --parent; }
    for (int64_t j = 0; j < parent; ++j) {
      check((shown[j] == 0) == (all[parent * row + j] == 0),
            "`tree_mask` is not a forest: ", token_text(i, tokens), " sees token ", parent,
            ", its parent, and only one of these two tokens sees token ", j,
            "; a token must see itself and exactly the tokens that its parent sees (the parent is "
            "the last earlier token that it sees)");
    }
  }
}

// Checks that the sequence has a key for each token, because its tokens are its last keys.
void check_keys(const FlashFwdArguments& f, const FlashFwdCall& call, const Tokens& tokens) {
  const auto value = [&](const OptionalTensor& lengths, int64_t otherwise) {
    return lengths ? values_on_cpu(*lengths)[tokens.sequence] : otherwise;
  };
  const int64_t keys = value(f.options.seqused_k, call.kv_length) - value(f.options.leftpad_k, 0);
  check(tokens.count <= keys, "sequence ", tokens.sequence, " has ", Counted{tokens.count, "query"},
        " in `q` and ", Counted{keys, "key"},
        "; with `parents` or `tree_mask` it needs a key for each query");
}

void check_tree_layout(ArgumentName name, const Tensor& tree, const FlashDecodeArguments& a,
                       const FlashFwdCall& call) {
  const FlashFwdArguments& f = a.forward;
  const int64_t length = call.q_length;
  Dims packed{call.q_total};
  Dims shared{length};
  Dims per_sequence{call.batch, length};
  if (a.options.tree_mask) {
    for (Dims* shape : {&packed, &shared, &per_sequence}) { shape->push_back(length); }
  }
  const ScalarType dtype = a.options.parents ? ScalarType::Int : ScalarType::Bool;
  f.packing ? check_operand(name, tree, "q", f.q, {dtype}, {packed})
            : check_operand(name, tree, "q", f.q, {dtype}, {shared, per_sequence});
}

// Refuses options that depend on the index of a key, or that move queries away from the last keys.
void check_options(ArgumentName name, const FlashDecodeArguments& a) {
  const FlashFwdOptions& o = a.forward.options;
  check(!o.q_offset, "`q_offset` is given with ", name,
        "; leave it out, because the queries of a tree belong to the last keys");
  check(!o.alibi_slopes, "`alibi_slopes` is given with ", name,
        "; slopes depend on the index of a key, which is not its position in a tree");
  check(!a.lists.indices, "`indices` is given with ", name, "; give lists or a tree, not both");
}

}  // namespace

void check_tree(const FlashDecodeArguments& a, FlashFwdCall& call) {
  const DecodeOptions& o = a.options;
  if (!o.has_tree()) { return; }
  check(!o.parents || !o.tree_mask, "`parents` and `tree_mask` are given; give one of them");
  const FlashFwdArguments& f = a.forward;
  const ArgumentName name = o.parents ? "parents" : "tree_mask";
  const Tensor& tree = o.parents ? *o.parents : *o.tree_mask;
  check(call.q_length <= TREE_TOKENS, name, " is given and a sequence has up to ",
        Counted{call.q_length, "query"}, "; a tree has at most ", TREE_TOKENS);
  check_tree_layout(name, tree, a, call);
  check_options(name, a);
  if (tree.is_cpu() && tree.numel() > 0) {
    for (const Tokens& tokens : tokens_of(f, call)) {
      check_keys(f, call, tokens);
      o.parents ? check_parents(tree, tokens) : check_mask(tree, tokens);
    }
  }
  FlashFwdFeatures& features = call.problem.features;
  features.tree_parents = o.parents.has_value();
  features.tree_mask = o.tree_mask.has_value();
  // The tree hides later tokens from a query, so only the left window needs a band.
  features.band = f.options.window_size_left >= 0;
}

std::string describe_tree(const DecodeOptions& o) {
  return !o.has_tree() ? ""
                       : std::string("; a query sees the new tokens that ") +
                             (o.parents ? "parents" : "tree_mask") + " allows";
}

void fill_tree_params(const DecodeOptions& o, FlashDecodeParams& params) {
  if (!o.has_tree()) { return; }
  params.problem.window_right = NO_WINDOW;  // the tree hides later tokens
  const Tensor& tree = o.parents ? *o.parents : *o.tree_mask;
  const int64_t token_dims = o.parents ? 1 : 2;
  params.tree_batch_stride = tree.dim() > token_dims ? tree.stride(0) : 0;
  params.tree_row_stride = o.tree_mask ? tree.stride(tree.dim() - 2) : 0;
}

}  // namespace metal_attn
