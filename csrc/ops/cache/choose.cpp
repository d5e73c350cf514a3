#include "csrc/ops/cache/choose.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "csrc/ops/common/check.h"
#include "csrc/ops/common/grid.h"
#include "csrc/problem/rope.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Times that a thread moves something, where there is so much: more threadgroups would only start
// more often.
constexpr int64_t kPasses = 4;

int choose_vector(const AppendKvArguments& a, const AppendKvProblem& p) {
  int64_t vector = std::min({kMaxVector, aligned_vector(*a.q), aligned_vector(*a.rotary_cos),
                             aligned_vector(*a.rotary_sin)});
  while (p.pairs % vector != 0) {
    vector /= 2;
  }
  return static_cast<int>(vector);
}

// The widest word that a thread copies.
constexpr int64_t kMaxWordBytes = 16;

struct Run {
  int64_t stride;
  int64_t size;
};

// What of a page lies side by side, innermost first: neighbours in memory are joined.
std::vector<Run> page_runs(const Tensor& cache) {
  std::vector<Run> dims;
  for (int64_t dim = 1; dim < cache.dim(); ++dim) {
    if (cache.size(dim) != 1) {
      dims.push_back({cache.stride(dim), cache.size(dim)});
    }
  }
  std::sort(dims.begin(), dims.end(),
            [](const Run& one, const Run& other) { return one.stride < other.stride; });
  std::vector<Run> runs{{1, 1}};
  for (const Run& dim : dims) {
    if (dim.stride == runs.back().stride * runs.back().size) {
      runs.back().size *= dim.size;
    } else {
      runs.push_back(dim);
    }
  }
  return runs;
}

// The widest power of two that every run of a page starts at and consists of.
int64_t word_bytes(const Tensor& cache, const std::vector<Run>& runs) {
  const int64_t element = static_cast<int64_t>(cache.element_size());
  int64_t bytes = std::min(kMaxWordBytes, element);
  const auto fits = [&](int64_t word) {
    bool fits = runs[0].size * element % word == 0 &&
                (cache.size(0) <= 1 || cache.stride(0) * element % word == 0);
    for (std::size_t i = 1; i < runs.size(); ++i) {
      fits = fits && runs[i].stride * element % word == 0;
    }
    const int64_t first =
        cache.is_cpu() ? static_cast<int64_t>(reinterpret_cast<uintptr_t>(cache.const_data_ptr()) %
                                              static_cast<uintptr_t>(word))
                       : cache.storage_offset() * element;
    return fits && first % word == 0;
  };
  while (bytes < kMaxWordBytes && fits(2 * bytes)) {
    bytes *= 2;
  }
  return bytes;
}

}  // namespace

AppendWidths append_widths(const AppendKvArguments& a, const AppendKvProblem& p) {
  const bool whole_units = p.head_dim_qk % kUnitColumns == 0 && p.head_dim_v % kUnitColumns == 0;
  const int store_bytes = kv_load_bytes(Element::kHalf, p.format);
  AppendWidths widths{};
  widths.loads = whole_units && rows_aligned_16(a.k) && rows_aligned_16(a.v);
  widths.stores =
      whole_units && rows_aligned(a.k_cache, store_bytes) && rows_aligned(a.v_cache, store_bytes);
  widths.rotary = widths.loads && a.rotary_cos && rows_aligned_16(*a.rotary_cos) &&
                  rows_aligned_16(*a.rotary_sin) &&
                  rotates_by_chunks(p.element, 2 * p.pairs, a.rotary_interleaved);
  return widths;
}

AppendKvSpecialisation choose_append_kv(const AppendKvArguments& a, const AppendKvProblem& p) {
  AppendKvSpecialisation s{};
  s.widths = append_widths(a, p);
  const int64_t row_units = divide_up(std::max(p.head_dim_qk, p.head_dim_v), kUnitColumns);
  int64_t work = p.writes() ? p.length * row_units : 0;
  s.block_rows = static_cast<int32_t>(std::max<int64_t>(kPasses * APPEND_THREADS / row_units, 1));
  int64_t blocks = divide_up(p.writes() ? p.length : 0, s.block_rows);
  int64_t head_groups = p.writes() ? p.kv_heads : 0;
  if (p.rotates_q()) {
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
  check(blocks * s.threads <= std::numeric_limits<uint32_t>::max(), "`k` has a length of ",
        p.length, " and `q` of ", p.q_length, "; Metal counts at most 2^32 - 1 threads");
  s.threadgroups = {static_cast<uint32_t>(blocks), static_cast<uint32_t>(head_groups),
                    static_cast<uint32_t>(p.batch)};
  return s;
}

Defines append_kv_defines(const AppendKvArguments& a, const AppendKvProblem& p,
                          const AppendKvSpecialisation& s) {
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
  define("Q_ROTARY", p.rotates_q());
  define("VECTOR", p.rotates_q() ? s.vector : 1);
  define("HEADS", p.rotates_q() ? s.q_shares.heads : 1);
  return defines;
}

CopyPagesSpecialisation choose_copy_pages(const Tensor& cache, const Tensor& src) {
  CopyPagesSpecialisation s{};
  s.copies = src.size(0);
  s.long_indices = src.scalar_type() == ScalarType::Long;
  s.word_bytes = 1;
  if (cache.numel() == 0) {
    return s;
  }
  std::vector<Run> runs = page_runs(cache);
  s.word_bytes = word_bytes(cache, runs);
  const int64_t element = static_cast<int64_t>(cache.element_size());
  runs[0].size = runs[0].size * element / s.word_bytes;
  int64_t words = 1;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const bool fits = !__builtin_mul_overflow(words, runs[i].size, &words);
    check(fits && words <= kMaxLength, "`cache` has shape ", shape_text(cache),
          "; a page may be at most ", kMaxLength, " words of ", s.word_bytes, " bytes");
    s.words.sizes[i] = static_cast<uint32_t>(runs[i].size);
    s.words.strides[i] = i == 0 ? 1 : runs[i].stride * element / s.word_bytes;
  }
  s.words.count = static_cast<int32_t>(runs.size());
  s.page_words = static_cast<uint32_t>(words);
  return s;
}

Defines copy_pages_defines(const CopyPagesSpecialisation& s) {
  const char* word = "uchar";
  switch (s.word_bytes) {
    case 16:
      word = "uint4";
      break;
    case 8:
      word = "uint2";
      break;
    case 4:
      word = "uint";
      break;
    case 2:
      word = "ushort";
      break;
    default:
      break;
  }
  return {{"WORD", word}, {"INDEX", s.long_indices ? "long" : "int"}};
}

std::array<uint32_t, 3> copy_pages_threadgroups(const CopyPagesSpecialisation& s) {
  const int64_t block = COPY_PAGES_THREADS * COPY_PAGES_WORDS;
  return {static_cast<uint32_t>(divide_up(s.page_words, block)), static_cast<uint32_t>(s.copies),
          1};
}

}  // namespace metal_attn
