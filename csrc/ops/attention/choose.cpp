#include "csrc/ops/attention/choose.h"

#include <algorithm>
#include <initializer_list>

#include "shaders/params.h"

namespace metal_attn {
namespace {

// A core has about 208 KB of registers. 116 of them for tiles, plus about 40 for addresses, softmax
// state and fragments in flight, leave room for 10 SIMD groups a core: two or three threadgroups.
// Reckoned from published figures; nobody here could measure it.
constexpr int kRegisterBudget = 116;

// A threadgroup accumulates at most this many columns of the output. Wider values are cut into
// slices over the grid, each of which computes the scores again: 512 columns of accumulators alone
// would take all 128 registers that a thread can have.
constexpr int kMaxSlice = 256;

// Two row fragments share each K and V fragment that is loaded, which halves threadgroup reads a
// matrix operation. Above this head dim their accumulators alone would fill the register budget.
constexpr int kMaxHeadDimForTwoRows = 128;

// Four SIMD groups share one staged tile: fewer would stage each key more often, more would make
// threadgroups too big to keep two on a core.
constexpr int kSimdgroups = 4;

int fragments(int columns) { return (columns + 7) / 8; }

// A thread holds two of a fragment's 64 elements.
int fragment_registers(int bytes) { return 2 * bytes / 4; }

// What tiles and fragments of k and v hold.
template <class Specialisation>
Element kv_element(const Specialisation& s) {
  return s.features.cache.element.value_or(s.element);
}

int q_registers(const FlashFwdSpecialisation& s) {
  return s.row_fragments * fragments(s.head_dim_qk) * fragment_registers(element_bytes(s.element));
}

int accumulator_registers(const FlashFwdSpecialisation& s) {
  const int score_chains = s.head_dim_qk > CHAIN_COLUMNS ? 2 : 1;
  const int block_sums = 1;  // a block's share of one column fragment of the output
  const int count = s.row_fragments * (s.v_slice / 8 + block_sums + score_chains * s.block_k / 8);
  return count * fragment_registers(sizeof(float));
}

bool fits_with_q(const FlashFwdSpecialisation& s) {
  return accumulator_registers(s) + q_registers(s) <= kRegisterBudget;
}

void append_features(Defines& defines, const FlashFwdFeatures& f, bool wide_rotary) {
  const auto define = [&defines](const char* name, auto value) {
    defines.push_back({name, value});
  };
  // A feature that is off is not defined, which the preprocessor takes for 0.
  const auto feature = [&define](const char* name, bool on) {
    if (on) {
      define(name, 1);
    }
  };
  feature("BAND", f.band);
  feature("CHUNKED", f.chunk);
  feature("VARLEN", f.varlen);
  feature("SEQUSED_K", f.seqused_k);
  feature("LEFTPAD_K", f.leftpad_k);
  if (f.mask) {
    define("MASK", 1);
    define("MASK_PAIRS", f.mask->pairs);
  }
  if (f.bias) {
    define("BIAS", 1);
    define("BIAS_PAIRS", f.bias->pairs);
    define("BIAS_ELEMENT", element_name(f.bias->element));
  }
  feature("SOFTCAP", f.softcap);
  feature("ALIBI", f.alibi);
  if (f.sink) {
    define("SINK", 1);
    define("SINK_ELEMENT", element_name(*f.sink));
  }
  if (f.rotary) {
    feature("Q_ROTARY", f.rotary->q);
    feature("K_ROTARY", f.rotary->k);
    define("ROTARY_ELEMENT", element_name(f.rotary->element));
    define("ROTARY_DIM", f.rotary->dim);
    define("ROTARY_INTERLEAVED", f.rotary->interleaved);
    feature("WIDE_ROTARY", wide_rotary);
  }
  feature("DROPOUT", f.dropout);
  if (f.cache.page_size > 0) {
    define("PAGE_SIZE", f.cache.page_size);
  }
  feature("CACHE_BATCH_IDX", f.cache.batch_idx);
  if (f.cache.element) {
    define("KV_ELEMENT", element_name(*f.cache.element));
  }
  if (f.cache.format != KvFormat::kPlain) {
    define("KV_FORMAT", static_cast<int>(f.cache.format));
    feature("K_SCALE", f.cache.k_scale);
    feature("V_SCALE", f.cache.v_scale);
  }
}

bool wide_loads(const FlashFwdProblem& problem) {
  return problem.aligned && problem.head_dim_qk % 8 == 0 && problem.head_dim_v % 8 == 0;
}

bool wide_rotary(const FlashFwdProblem& problem) {
  if (!problem.features.rotary) {
    return false;
  }
  const FusedRotary& rotary = *problem.features.rotary;
  return wide_loads(problem) && rotary.aligned &&
         turns_by_chunks(problem.element, rotary.dim, rotary.interleaved);
}

// That keep a core busy, as with kRegisterBudget.
constexpr int64_t kThreadgroupsPerCore = 3;

// Threadgroups that keep the largest GPU, of 80 cores, busy.
constexpr int64_t kBusyThreadgroups = 80 * kThreadgroupsPerCore;

// Columns of a slice, a multiple of 8.
int slice_columns(int columns, int slices) {
  return 8 * ((fragments(columns) + slices - 1) / slices);
}

// What every kernel of attention takes from a problem as it is.
template <class Specialisation>
Specialisation specialisation_for(const FlashFwdProblem& problem) {
  Specialisation s{};
  s.element = problem.element;
  s.head_dim_qk = problem.head_dim_qk;
  s.head_dim_v = problem.head_dim_v;
  s.wide_loads = wide_loads(problem);
  s.features = problem.features;
  return s;
}

// The defines that every kernel of attention has, its own, and those of the features.
template <class Specialisation>
Defines all_defines(const Specialisation& s, const Defines& own, bool wide_rotary) {
  Defines defines{
      {"ELEMENT", element_name(s.element)}, {"HEAD_DIM_QK", s.head_dim_qk},
      {"HEAD_DIM_V", s.head_dim_v},         {"ROW_FRAGMENTS", s.row_fragments},
      {"WIDE_LOADS", s.wide_loads},
  };
  defines.append(own.begin(), own.end());
  append_features(defines, s.features, wide_rotary);
  return defines;
}

template <class Specialisation>
bool fits(const Specialisation& s) {
  return s.registers() <= kRegisterBudget && s.threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES;
}

// Of a gradient's kernel: rows in registers first, and two row fragments, which halve the loads a
// matrix operation; then the largest block. False if none fits.
template <class Specialisation>
bool choose_rows(Specialisation& s, int& s_block) {
  for (bool held : {true, false}) {
    for (int row_fragments : {2, 1}) {
      for (int block : {32, 16, 8}) {
        s.rows_in_registers = held;
        s.row_fragments = row_fragments;
        s_block = block;
        if ((held || row_fragments == 1) && fits(s)) {
          return true;
        }
      }
    }
  }
  return false;
}

// Registers of the two operands whose rows a gradient's kernel owns.
template <class Specialisation>
int held_registers(const Specialisation& s) {
  const int count = s.row_fragments * (fragments(s.head_dim_qk) + fragments(s.head_dim_v));
  return s.rows_in_registers ? count * fragment_registers(element_bytes(s.element)) : 0;
}

template <class Specialisation>
int second_chains(const Specialisation& s) {
  return s.head_dim_qk > CHAIN_COLUMNS || s.head_dim_v > CHAIN_COLUMNS ? 1 : 0;
}

// Columns of the two tiles that are staged as pairs.
template <class Specialisation>
int pair_columns(const Specialisation& s) {
  return padded(8 * fragments(s.head_dim_qk)) + padded(8 * fragments(s.head_dim_v));
}

}  // namespace

bool turns_by_chunks(Element element, int rotary_dim, bool interleaved) {
  const int chunk = 16 / element_bytes(element);
  return rotary_dim % (interleaved ? chunk : 2 * chunk) == 0;
}

const char* element_name(Element element) {
  switch (element) {
    case Element::kFloat:
      return "float";
    case Element::kHalf:
      return "half";
    case Element::kBfloat:
      return "bfloat";
  }
  return "";
}

int element_bytes(Element element) { return element == Element::kFloat ? 4 : 2; }

int kv_load_bytes(Element element, KvFormat format) {
  const int columns = 16 / element_bytes(element);
  switch (format) {
    case KvFormat::kPlain:
      return 16;
    case KvFormat::kQ4_0:
      return columns / 2;
    default:
      return columns;
  }
}

int FlashFwdSpecialisation::registers() const {
  return accumulator_registers(*this) + (q_in_registers ? q_registers(*this) : 0);
}

int FlashFwdSpecialisation::threadgroup_bytes() const {
  const int elements = block_k * (padded(8 * fragments(head_dim_qk)) + padded(v_slice));
  return elements * element_bytes(kv_element(*this));
}

FlashFwdSpecialisation choose_flash_fwd(const FlashFwdProblem& problem) {
  auto s = specialisation_for<FlashFwdSpecialisation>(problem);
  s.simdgroups = kSimdgroups;
  const int slices = (problem.head_dim_v + kMaxSlice - 1) / kMaxSlice;
  s.v_slice = slice_columns(problem.head_dim_v, slices);
  s.wide_rotary = wide_rotary(problem);

  // More keys a block mean fewer barriers and rescalings a key.
  for (int block_k : {32, 16, 8}) {
    s.block_k = block_k;
    if (s.threadgroup_bytes() <= THREADGROUP_MEMORY_BYTES) {
      break;
    }
  }
  // Q is read again for every block, so it moves out of registers only where one row fragment of
  // queries does not fit either.
  s.row_fragments = 2;
  if (std::max(s.head_dim_qk, s.v_slice) > kMaxHeadDimForTwoRows || !fits_with_q(s)) {
    s.row_fragments = 1;
  }
  s.q_in_registers = fits_with_q(s);
  return s;
}

Defines flash_fwd_defines(const FlashFwdSpecialisation& s) {
  Defines own{
      {"V_SLICE", s.v_slice},
      {"BLOCK_K", s.block_k},
      {"SIMDGROUPS", s.simdgroups},
      {"Q_IN_REGISTERS", s.q_in_registers},
  };
  return all_defines(s, own, s.wide_rotary);
}

int FlashBwdSpecialisation::qk_slice() const { return slice_columns(head_dim_qk, slices); }

int FlashBwdSpecialisation::v_slice() const { return slice_columns(head_dim_v, slices); }

int FlashBwdSpecialisation::registers() const {
  const int gradients = (qk_slice() + (dkv ? v_slice() : 0)) / 8;
  const int block_sums = 1;
  // Weights and their gradients; with a cap its slope too.
  const int score_tiles = 2 + second_chains(*this) + (features.softcap ? 1 : 0);
  const int accumulators = row_fragments * (gradients + block_sums + score_tiles * block / 8);
  return held_registers(*this) + accumulators * fragment_registers(sizeof(float));
}

int FlashBwdSpecialisation::threadgroup_bytes() const {
  const int pairs = pair_columns(*this);
  const int rows = padded(qk_slice()) + (dkv ? padded(v_slice()) : 0);
  const int row_statistics = normalised() ? 3 : 2;
  const int statistics = dkv ? row_statistics * block : exact_delta ? simdgroups : 0;
  return block * (pairs + rows) * element_bytes(element) + statistics * int(sizeof(float));
}

namespace {

// The fewest slices first, since each computes the scores again.
std::optional<FlashBwdSpecialisation> choose_flash_bwd(const FlashFwdProblem& problem, bool dkv,
                                                       bool exact_delta) {
  auto s = specialisation_for<FlashBwdSpecialisation>(problem);
  s.simdgroups = kSimdgroups;
  s.wide_rotary = wide_rotary(problem);
  s.dkv = dkv;
  s.exact_delta = exact_delta;
  const int most_slices = std::max(fragments(s.head_dim_qk), fragments(s.head_dim_v));
  for (s.slices = 1; s.slices <= most_slices; ++s.slices) {
    if (choose_rows(s, s.block)) {
      return s;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<FlashBwdSpecialisation> choose_flash_bwd_dq(const FlashFwdProblem& problem,
                                                          bool exact_delta) {
  return choose_flash_bwd(problem, false, exact_delta);
}

std::optional<FlashBwdSpecialisation> choose_flash_bwd_dkv(const FlashFwdProblem& problem,
                                                           bool exact_delta) {
  return choose_flash_bwd(problem, true, exact_delta);
}

Defines flash_bwd_defines(const FlashBwdSpecialisation& s) {
  Defines own{
      {s.dkv ? "DK_SLICE" : "DQ_SLICE", s.qk_slice()},
      {s.dkv ? "BLOCK_Q" : "BLOCK_K", s.block},
      {"SIMDGROUPS", s.simdgroups},
      {"ROWS_IN_REGISTERS", s.rows_in_registers},
  };
  if (s.dkv) {
    own.push_back({"DV_SLICE", s.v_slice()});
    own.push_back({"SLICES", s.slices});
  }
  if (s.exact_delta && !s.dkv) {
    own.push_back({"EXACT_DELTA", 1});
  }
  if (s.normalised()) {
    own.push_back({"NORMALISED", 1});
  }
  return all_defines(s, own, s.wide_rotary);
}

int FlashBwdBiasSpecialisation::registers() const {
  // Scores, their gradients, and the sum of those.
  const int score_tiles = 3 + second_chains(*this);
  return held_registers(*this) +
         row_fragments * score_tiles * block_k / 8 * fragment_registers(sizeof(float));
}

int FlashBwdBiasSpecialisation::threadgroup_bytes() const {
  const int pairs = pair_columns(*this);
  const int column_sums = simdgroups * block_k * int(sizeof(float));
  return block_k * pairs * element_bytes(element) + column_sums;
}

std::optional<FlashBwdBiasSpecialisation> choose_flash_bwd_bias(const FlashFwdProblem& problem) {
  auto s = specialisation_for<FlashBwdBiasSpecialisation>(problem);
  s.simdgroups = kSimdgroups;
  s.wide_rotary = wide_rotary(problem);
  if (choose_rows(s, s.block_k)) {
    return s;
  }
  return std::nullopt;
}

Defines flash_bwd_bias_defines(const FlashBwdBiasSpecialisation& s) {
  Defines own{
      {"BLOCK_K", s.block_k},
      {"SIMDGROUPS", s.simdgroups},
      {"ROWS_IN_REGISTERS", s.rows_in_registers},
  };
  return all_defines(s, own, s.wide_rotary);
}

// No more parts than keep the GPU busy: each writes float32 of the whole bias, which is then less
// than twice kBusyThreadgroups tiles, however large the bias is.
int64_t flash_bwd_bias_splits(int64_t owned, int64_t shared) {
  if (owned == 0 || shared == 0) {
    return 1;
  }
  return std::min(shared, (kBusyThreadgroups + owned - 1) / owned);
}

namespace {

// Columns of a row that one lane's load and three others' make (shaders/spans.h).
constexpr int kSpanColumns = 32;
constexpr int kSpanFragments = kSpanColumns / 8;

int spans(int columns) { return (columns + kSpanColumns - 1) / kSpanColumns; }

// Of rows that a tile can have, so that 32 query heads of one KV head read its keys once.
constexpr int64_t kMaxDecodeRows = 32;

// As many keys a split at least that its own traffic, its queries and its float32 result written
// and read again, is no more than an eighth of theirs.
constexpr int64_t kSplitShare = 8;

int own_spans(int columns, int simdgroups) {
  return (spans(columns) + simdgroups - 1) / simdgroups;
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
  const int units = (1 + (v_in_k ? v_spans : 1) * key_fragments) * kSpanFragments * kv_operand;
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
// them, since those meet at barriers; then the largest block.
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

std::string describe_choice(const FlashFwdSpecialisation& s) {
  std::string slices;
  if (s.v_slices() > 1) {
    slices = "v in " + std::to_string(s.v_slices()) + " slices of " + std::to_string(s.v_slice) +
             " columns, each with the scores computed again; ";
  }
  const std::string bytes = std::to_string(kv_load_bytes(s.element, s.features.cache.format));
  std::string loads = bytes + "-byte loads of k and v";
  if (!s.wide_loads) {
    loads = "element-wise loads of k and v, as some row is not " + bytes +
            "-byte aligned or a head dim is no multiple of 8";
  }
  if (s.features.rotary && s.features.rotary->k && !s.wide_rotary) {
    loads += "; k rotated element by element";
  }
  return std::to_string(8 * s.row_fragments) + " queries a SIMD group and Q " +
         (s.q_in_registers ? "in registers" : "read again for every block") + ": " +
         std::to_string(s.registers()) + " of " + std::to_string(kRegisterBudget) +
         " tile registers a thread; " + std::to_string(s.block_k) +
         " keys a block: " + std::to_string(s.threadgroup_bytes()) + " of " +
         std::to_string(THREADGROUP_MEMORY_BYTES) + " bytes of threadgroup memory; " + slices +
         loads;
}

}  // namespace metal_attn
