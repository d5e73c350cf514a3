#include "csrc/ops/decode/choose.h"

#include <algorithm>

#include "csrc/ops/attention/check.h"
#include "csrc/ops/attention/choose_shared.h"
#include "csrc/ops/merge/types.h"
#include "csrc/runtime/callbacks.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

using torch::stable::Tensor;

// Columns of a row that one lane's load and three others' make (shaders/spans.h).
constexpr int kSpanColumns = 32;
constexpr int kSpanFragments = kSpanColumns / 8;

int spans(int columns) { return (columns + kSpanColumns - 1) / kSpanColumns; }

// Of rows that a tile can have, so that 32 query heads of one KV head read its keys once.
constexpr int64_t kMaxDecodeRows = 32;

// As many keys a split at least that its own traffic, its queries and its float32 result written
// and read again, is no more than an eighth of theirs.
constexpr int64_t kSplitShare = 8;

// 8-key fragments of a block whose values are loaded before its scores; and from how many spans of
// values on that is done, as fewer are too few loads at a time (bench/results/replay.md).
constexpr int kFirstKeyFragments = 2;
constexpr int kFirstSpans = 4;

int own_spans(int columns, int simdgroups) {
  return (spans(columns) + simdgroups - 1) / simdgroups;
}

// Whether two tensors begin at one element and step alike, the second no wider.
bool begins(const Tensor& whole, const Tensor& part) {
  const int64_t last = part.dim() - 1;
  bool same = part.numel() > 0 && part.const_data_ptr() == whole.const_data_ptr() &&
              part.dim() == whole.dim() && part.size(last) <= whole.size(last);
  for (int64_t dim = 0; same && dim < last; ++dim) {
    same = part.stride(dim) == whole.stride(dim);
  }
  return same;
}

// Whether v is the first columns of k, as in the latent caches of DeepSeek's MLA: one read serves
// both.
bool v_in_k(const FlashFwdArguments& a) {
  const bool scaled = a.cache.k_scale && a.cache.v_scale;
  return begins(a.k, a.v) && (!scaled || begins(*a.cache.k_scale, *a.cache.v_scale));
}

// Keys that the queries of one sequence read, at most.
int64_t keys_read(const FlashFwdOptions& o, const FlashFwdCall& call) {
  int64_t keys = call.kv_length;
  const int64_t right = o.causal ? 0 : o.window_size_right;
  if (o.window_size_left >= 0 && right >= 0) {
    // Either may be near 2^63.
    keys =
        std::min(keys, std::min(o.window_size_left, keys) + std::min(right, keys) + call.q_length);
  }
  if (o.q_offset && window_right(o) != NO_WINDOW) {
    keys = std::clamp<int64_t>(*o.q_offset + call.q_length + window_right(o), 0, keys);
  }
  if (o.attention_chunk > 0) {
    keys = std::min(keys, o.attention_chunk + call.q_length);
  }
  return keys;
}

}  // namespace

int FlashDecodeSpecialisation::registers() const {
  const int q_operand = fragment_registers(element_bytes(element));
  const int kv_operand = fragment_registers(element_bytes(kv_element(*this)));
  const int sum = fragment_registers(sizeof(float));
  const int qk_spans = own_spans(head_dim_qk, column_simdgroups);
  const int v_spans = own_spans(head_dim_v, column_simdgroups);
  // Products and the scores that they become, and one chain of products.
  const int scores = row_fragments * (2 * key_fragments + 1) * sum;
  const int units =
      (1 + (v_in_k || v_first ? v_spans : 1) * key_fragments) * kSpanFragments * kv_operand;
  return row_fragments * kSpanFragments * (qk_spans * q_operand + v_spans * sum) + scores + units;
}

int FlashDecodeSpecialisation::threadgroup_bytes() const {
  const int tiles = key_simdgroups * column_simdgroups + (column_simdgroups > 1 ? 1 : 0);
  int floats = tiles * rows() * padded(8 * key_fragments);
  int q_elements = 0;
  if (key_simdgroups > 1) {
    constexpr int kFragmentElements = 64;
    const int span_elements = row_fragments * kSpanFragments * kFragmentElements;
    floats += spans(head_dim_v) * span_elements + 2 * key_simdgroups * rows();
    q_elements = spans(head_dim_qk) * span_elements;
  }
  return floats * int(sizeof(float)) + q_elements * element_bytes(element);
}

// All rows at once if they fit, so that keys are read once; then the fewest SIMD groups that share
// them, since those meet at barriers; then values loaded before the scores, so that a block waits
// for memory once; then the largest block.
FlashDecodeSpecialisation choose_flash_decode(const FlashFwdProblem& problem, int64_t rows,
                                              bool v_in_k) {
  auto s = specialisation_for<FlashDecodeSpecialisation>(problem);
  s.v_in_k = v_in_k;
  const int wanted = static_cast<int>((std::clamp<int64_t>(rows, 1, kMaxDecodeRows) + 7) / 8);
  const int all_spans = std::max(spans(s.head_dim_qk), spans(s.head_dim_v));
  // One row fragment fits whatever the head dims.
  for (s.row_fragments = wanted;; --s.row_fragments) {
    for (int share = all_spans; share > 0; --share) {
      s.column_simdgroups = (all_spans + share - 1) / share;
      s.key_simdgroups = s.column_simdgroups > 1 ? 1 : kSimdgroups;
      s.key_fragments = kFirstKeyFragments;
      s.v_first = !v_in_k && (s.column_simdgroups > 1 || spans(s.head_dim_v) >= kFirstSpans);
      if (s.v_first && fits(s)) {
        return s;
      }
      s.v_first = false;
      for (int key_fragments : {4, 2, 1}) {
        s.key_fragments = key_fragments;
        if (fits(s)) {
          return s;
        }
      }
    }
  }
}

int64_t flash_decode_splits(const FlashDecodeSpecialisation& s, int64_t groups, int64_t rows,
                            int64_t keys, int cores) {
  const int64_t steps = (keys + s.step_keys() - 1) / s.step_keys();
  if (steps == 0 || groups == 0) {
    return 1;
  }
  const int64_t q_bytes = s.head_dim_qk * element_bytes(s.element);
  const int64_t own = rows * (q_bytes + 2 * s.head_dim_v * int64_t(sizeof(float)));
  const int64_t key =
      (s.head_dim_qk + (s.v_in_k ? 0 : s.head_dim_v)) * element_bytes(kv_element(s));
  const int64_t least_keys = kSplitShare * own / key;
  const int64_t wanted = (kThreadgroupsPerCore * cores + groups - 1) / groups;
  const int64_t most = std::min({steps, std::max<int64_t>(keys / least_keys, 1), kMaxSplits});
  const int64_t split_steps = (steps + std::min(wanted, most) - 1) / std::min(wanted, most);
  return (steps + split_steps - 1) / split_steps;
}

Defines flash_decode_defines(const FlashDecodeSpecialisation& s, bool split) {
  Defines own{
      {"KEY_FRAGMENTS", s.key_fragments},
      {"KEY_SIMDGROUPS", s.key_simdgroups},
      {"COLUMN_SIMDGROUPS", s.column_simdgroups},
  };
  if (split) {
    own.push_back({"SPLIT", 1});
  }
  if (s.v_in_k) {
    own.push_back({"V_IN_K", 1});
  }
  if (s.v_first) {
    own.push_back({"V_FIRST", 1});
  }
  return all_defines(s, own, false);
}

std::string describe_choice(const FlashDecodeSpecialisation& s, int64_t rows, int64_t splits) {
  const int64_t passes = (rows + s.rows() - 1) / s.rows();
  return std::to_string(splits) + " splits of the keys; " + std::to_string(rows) +
         " queries of a KV head in " + std::to_string(passes) + " passes over its keys" +
         (s.v_in_k ? ", which hold the values too" : "") + "; " + std::to_string(s.key_simdgroups) +
         " SIMD groups with their own keys, " + std::to_string(s.column_simdgroups) +
         " with their own columns: " + std::to_string(s.registers()) + " of " +
         std::to_string(kRegisterBudget) + " tile registers a thread";
}

FlashDecodeCall choose_flash_decode(const FlashFwdCall& forward, const FlashDecodeArguments& a) {
  const FlashFwdArguments& f = a.forward;
  FlashDecodeCall call{forward, {}, 1, {}};
  if (!forward.launches()) {
    return call;
  }
  call.specialisation = choose_flash_decode(forward.problem, call.rows(), v_in_k(f));
  const int64_t groups = int64_t{forward.batch} * forward.kv_heads;
  call.splits = a.num_splits > 0 ? a.num_splits
                                 : flash_decode_splits(call.specialisation, groups, call.rows(),
                                                       keys_read(f.options, forward), gpu_cores());
  call.threadgroups = {static_cast<uint32_t>(call.splits), static_cast<uint32_t>(forward.kv_heads),
                       static_cast<uint32_t>(forward.batch)};
  return call;
}

Defines flash_decode_defines(const FlashDecodeCall& call, const FlashDecodeAppend* append) {
  Defines defines = flash_decode_defines(call.specialisation, call.splits > 1);
  if (append != nullptr) {
    defines.append(append->defines.begin(), append->defines.end());
  }
  return defines;
}

}  // namespace metal_attn
