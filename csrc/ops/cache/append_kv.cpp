#include "csrc/ops/cache/append_kv.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "csrc/ops/attention/fill.h"
#include "csrc/ops/cache/check_append_kv.h"
#include "csrc/ops/cache/fill.h"
#include "csrc/ops/common/check.h"
#include "csrc/ops/common/json.h"
#include "csrc/ops/rope/rotation.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

using torch::stable::Tensor;
using OptionalTensor = AppendKvArguments::OptionalTensor;

constexpr int64_t kSimdgroupThreads = 32;

// Times that a thread moves something, where there is so much: more threadgroups would only start
// more often.
constexpr int64_t kPasses = 4;

struct Specialisation {
  AppendWidths widths;
  int vector;  // pairs of q that a thread turns
  HeadShares q_shares;
  int32_t block_rows;
  int32_t block_tokens;
  std::array<uint32_t, 3> threadgroups;
  uint32_t threads;
};

int choose_vector(const AppendKvArguments& a, const AppendKvProblem& p) {
  int64_t vector = std::min({kMaxVector, aligned_vector(*a.q), aligned_vector(*a.rotary_cos),
                             aligned_vector(*a.rotary_sin)});
  while (p.pairs % vector != 0) {
    vector /= 2;
  }
  return static_cast<int>(vector);
}

Specialisation choose(const AppendKvArguments& a, const AppendKvProblem& p) {
  Specialisation s{};
  s.widths = append_widths(a, p);
  const int64_t row_units = divide_up(std::max(p.head_dim_qk, p.head_dim_v), kUnitColumns);
  int64_t work = p.writes() ? p.length * row_units : 0;
  s.block_rows = static_cast<int32_t>(std::max<int64_t>(kPasses * APPEND_THREADS / row_units, 1));
  int64_t blocks = divide_up(p.writes() ? p.length : 0, s.block_rows);
  int64_t head_groups = p.writes() ? p.kv_heads : 0;
  if (p.turns_q()) {
    s.vector = choose_vector(a, p);
    const int64_t units = p.pairs / s.vector;
    s.q_shares = share_heads(static_cast<double>(p.batch) * p.q_length * units, p.q_heads);
    s.block_tokens = static_cast<int32_t>(std::max<int64_t>(APPEND_THREADS / units, 1));
    work = std::max(work, p.q_length * units);
    blocks = std::max(blocks, divide_up(p.q_length, s.block_tokens));
    head_groups += s.q_shares.groups;
  }
  s.threads = static_cast<uint32_t>(
      std::min<int64_t>(divide_up(work, kSimdgroupThreads) * kSimdgroupThreads, APPEND_THREADS));
  check(blocks * s.threads <= std::numeric_limits<uint32_t>::max(), "k has a length of ", p.length,
        " and q of ", p.q_length, "; Metal counts at most 2^32 - 1 threads");
  s.threadgroups = {static_cast<uint32_t>(blocks), static_cast<uint32_t>(head_groups),
                    static_cast<uint32_t>(p.batch)};
  return s;
}

Defines defines_of(const AppendKvArguments& a, const AppendKvProblem& p, const Specialisation& s) {
  Defines defines{{"ELEMENT", element_name(p.element)},
                  {"HEAD_DIM_QK", p.head_dim_qk},
                  {"HEAD_DIM_V", p.head_dim_v},
                  {"WIDE_LOADS", s.widths.loads},
                  {"WIDE_STORES", s.widths.stores}};
  // What is off is not defined, which the preprocessor takes for 0.
  const auto define = [&defines](const char* name, int value) {
    if (value != 0) {
      defines.push_back({name, value});
    }
  };
  define("PAGE_SIZE", p.page_size);
  if (p.cache_element) {
    defines.push_back({"KV_ELEMENT", element_name(*p.cache_element)});
  }
  define("CACHE_BATCH_IDX", a.cache.cache_batch_idx.has_value());
  define("CACHE_SEQLENS", a.cache_seqlens.has_value());
  define("LEFTPAD_K", a.leftpad_k && a.rotary_from_leftpad);
  define("KV_FORMAT", static_cast<int>(p.format));
  define("K_SCALE", a.cache.k_scale.has_value());
  define("V_SCALE", a.cache.v_scale.has_value());
  if (p.pairs > 0) {
    define("NEW_K_ROTARY", 1);
    defines.push_back({"ROTARY_ELEMENT", element_name(p.table_element)});
    define("ROTARY_DIM", 2 * p.pairs);
    defines.push_back({"ROTARY_INTERLEAVED", a.rotary_interleaved});
    define("WIDE_ROTARY", s.widths.rotary);
  }
  if (p.turns_q()) {
    define("VECTOR", s.vector);
    define("HEADS", s.q_shares.heads);
  }
  return defines;
}

RopeParams turned_q(const AppendKvArguments& a, const AppendKvProblem& p, const Specialisation& s) {
  RopeParams params{};
  if (p.turns_q()) {
    const RowStrides q = row_strides(*a.q);
    params.q_strides = {q.batch, q.head, q.row, 1};
    params.cos_strides = {0, a.rotary_cos->stride(0), 1};
    params.sin_strides = {0, a.rotary_sin->stride(0), 1};
    params.table_rows = p.table_rows;
    params.q_heads = p.q_heads;
    params.length = p.q_length;
    params.pairs = p.pairs;
    params.pair_units = p.pairs / s.vector;
    params.sine_sign = 1.0f;
  }
  return params;
}

Launch launch_of(const AppendKvArguments& a, const AppendKvProblem& p, const Specialisation& s) {
  AppendKvParams params{};
  params.append = append_params(a, p);
  params.q = turned_q(a, p, s);
  params.kv_heads = p.writes() ? p.kv_heads : 0;
  params.block_rows = s.block_rows;
  params.block_tokens = s.block_tokens;
  params.q_advances = a.rotate_q_by_token;

  Launch launch;
  launch.program.family = "append_kv";
  launch.kernel = "append_kv";
  launch.program.defines = defines_of(a, p, s);
  const auto add = [&](uint32_t slot, const Tensor& tensor, bool writable) {
    // Where no row is written a tensor may have no memory, and q stands for it.
    launch.buffers.push_back({slot, tensor.numel() > 0 ? tensor : *a.q, writable});
  };
  const auto add_given = [&](uint32_t slot, const OptionalTensor& tensor, bool writable) {
    if (tensor) {
      add(slot, *tensor, writable);
    }
  };
  add(APPEND_K, a.k, false);
  add(APPEND_V, a.v, false);
  add(APPEND_K_CACHE, a.k_cache, true);
  add(APPEND_V_CACHE, a.v_cache, true);
  add_given(APPEND_K_SCALE, a.cache.k_scale, p.block_scales());
  add_given(APPEND_V_SCALE, a.cache.v_scale, p.block_scales());
  add_given(APPEND_SEQLENS, a.cache_seqlens, false);
  add_given(APPEND_BLOCK_TABLE, a.cache.block_table, false);
  add_given(APPEND_CACHE_BATCH_IDX, a.cache.cache_batch_idx, false);
  if (a.rotary_from_leftpad) {
    add_given(APPEND_LEFTPAD_K, a.leftpad_k, false);
  }
  if (p.turns_q()) {
    add(APPEND_Q, *a.q, true);
  }
  if (p.pairs > 0) {
    add(APPEND_COS, *a.rotary_cos, false);
    add(APPEND_SIN, *a.rotary_sin, false);
  }
  launch.params_slot = APPEND_PARAMS;
  launch.params.set(params);
  launch.threadgroups = s.threadgroups;
  launch.threads = {s.threads, 1, 1};
  return launch;
}

}  // namespace

void append_kv(const AppendKvArguments& a, Backend& backend) {
  const AppendKvProblem p = check_append_kv(a);
  if (p.writes() || p.turns_q()) {
    backend.run(launch_of(a, p, choose(a, p)));
  }
}

std::string append_kv_explain(const AppendKvArguments& a) {
  const AppendKvProblem p = check_append_kv(a);
  const Specialisation s = choose(a, p);
  const bool launches = p.writes() || p.turns_q();
  return JsonObject()
      .add("kernel", "append_kv")
      .add("defines", defines_of(a, p, s))
      .add("grid", s.threadgroups)
      .add("threads", std::array<uint32_t, 3>{s.threads, 1, 1})
      .add("threadgroup_bytes", int64_t{0})
      .add("backend", a.k.is_cpu() ? "simulator" : "mps")
      .add("reason", launches
                         ? std::to_string(s.block_rows) + " new rows of a KV head a threadgroup"
                         : "nothing to write or to turn: no kernel is launched")
      .text();
}

}  // namespace metal_attn
