#include "csrc/ops/cache/copy_pages.h"

#include <bit>

#include "csrc/ops/common/overlap.h"
#include "csrc/ops/common/recorder.h"
#include "shaders/params/pages.h"

namespace metal_attn {
namespace {

void check_pages(ArgumentName name, const Tensor& pages, const Tensor& cache) {
  check_same_device(name, pages, "cache", cache);
  check_dtype(name, pages, {ScalarType::Int, ScalarType::Long});
  check_rank(name, pages, 1, "(copies)");
  check_length(name, pages, 0, "length");
  check_storage(name, pages);
  check(!spans_overlap(pages, cache), name,
        " overlaps the memory of `cache`, which is written; call ", name, ".clone() first");
}

// The values of a CPU tensor. Checks that each is the number of a page.
std::vector<int64_t> page_numbers(ArgumentName name, const Tensor& pages, int64_t count) {
  std::vector<int64_t> numbers;
  for (int64_t i = 0; i < pages.size(0); ++i) {
    const int64_t at = i * pages.stride(0);
    const void* data = pages.const_data_ptr();
    numbers.push_back(pages.scalar_type() == ScalarType::Long
                          ? static_cast<const int64_t*>(data)[at]
                          : static_cast<const int32_t*>(data)[at]);
    check(numbers.back() >= 0 && numbers.back() < count, name, "[", i, "] is ", numbers.back(),
          "; it must be in 0..", count - 1, ", because `cache` has ", Counted{count, "page"});
  }
  return numbers;
}

void check_order_does_not_matter(const std::vector<int64_t>& src, const std::vector<int64_t>& dst) {
  std::unordered_map<int64_t, std::size_t> written;
  for (std::size_t i = 0; i < dst.size(); ++i) {
    const auto [at, first] = written.emplace(dst[i], i);
    check(first, "`dst`[", at->second, "] and `dst`[", i, "] are both ", dst[i],
          "; a page must be written only once");
  }
  for (std::size_t i = 0; i < src.size(); ++i) {
    const auto at = written.find(src[i]);
    check(at == written.end(), "`src`[", i, "] and `dst`[", at == written.end() ? 0 : at->second,
          "] are both ", src[i], "; a page must not be both read and written");
  }
}

void check_copy_pages(const Tensor& cache, const Tensor& src, const Tensor& dst) {
  check_device("cache", cache);
  check(cache.dim() >= 1, "`cache` has no dimensions; it must be (pages, ...)");
  check_storage("cache", cache);
  check_no_overlap("cache", cache);
  check_pages("src", src, cache);
  check_pages("dst", dst, cache);
  check_same_dtype("dst", dst, "src", src);
  check_shape("dst", dst, {{src.size(0)}});
  if (cache.is_cpu()) {
    check_order_does_not_matter(page_numbers("src", src, cache.size(0)),
                                page_numbers("dst", dst, cache.size(0)));
  }
}

// The widest word that a thread copies.
constexpr int64_t kMaxWordBytes = 16;

struct Run {
  int64_t stride;  // between the elements
  int64_t size;
};

// The dimensions of a page, innermost first. Contiguous dimensions are joined.
std::vector<Run> page_runs(const Tensor& cache) {
  std::vector<Run> dims;
  for (int64_t dim = 1; dim < cache.dim(); ++dim) {
    if (cache.size(dim) != 1) { dims.push_back({cache.stride(dim), cache.size(dim)}); }
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

// The largest word in bytes, a power of two, that divides starts and sizes of all runs of a page.
int64_t word_bytes(const Tensor& cache, const std::vector<Run>& runs) {
  const int64_t element = static_cast<int64_t>(cache.element_size());
  int64_t bytes = std::min(kMaxWordBytes, element);
  const auto fits = [&](int64_t word) {
    bool fits = runs[0].size * element % word == 0 &&
                (cache.size(0) <= 1 || cache.stride(0) * element % word == 0);
    for (std::size_t i = 1; i < runs.size(); ++i) {
      fits = fits && runs[i].stride * element % word == 0;
    }
    return fits && first_byte(cache) % static_cast<uint64_t>(word) == 0;
  };
  while (bytes < kMaxWordBytes && fits(2 * bytes)) { bytes *= 2; }
  return bytes;
}

struct CopyPagesSpecialisation {
  int64_t copies;
  int64_t word_bytes;
  bool long_indices;
  RowDims words;  // of a page
  uint32_t page_words;

  bool launches() const { return copies > 0 && page_words > 0; }
};

// Refuses pages with more words than Metal can count.
CopyPagesSpecialisation choose_copy_pages(const Tensor& cache, const Tensor& src) {
  CopyPagesSpecialisation s{};
  s.copies = src.size(0);
  s.long_indices = src.scalar_type() == ScalarType::Long;
  s.word_bytes = 1;
  if (cache.numel() == 0) { return s; }
  std::vector<Run> runs = page_runs(cache);
  s.word_bytes = word_bytes(cache, runs);
  const int64_t element = static_cast<int64_t>(cache.element_size());
  runs[0].size = runs[0].size * element / s.word_bytes;
  int64_t words = 1;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const bool fits = !__builtin_mul_overflow(words, runs[i].size, &words);
    check(fits && words <= kMaxLength, "`cache` has shape ", shape_text(cache),
          "; a page may have at most ", kMaxLength, " words of ", s.word_bytes, " bytes");
    s.words.sizes[i] = static_cast<uint32_t>(runs[i].size);
    s.words.strides[i] = i == 0 ? 1 : runs[i].stride * element / s.word_bytes;
  }
  s.words.count = static_cast<int32_t>(runs.size());
  s.page_words = static_cast<uint32_t>(words);
  return s;
}

Defines copy_pages_defines(const CopyPagesSpecialisation& s) {
  constexpr const char* kWords[] = {"uchar", "ushort", "uint", "uint2", "uint4"};  // by log2(bytes)
  const char* word = kWords[std::countr_zero(static_cast<uint64_t>(s.word_bytes))];
  return {{"WORD", word}, {"INDEX", s.long_indices ? "long" : "int"}};
}

Launch copy_pages_launch(const Tensor& cache, const Tensor& src, const Tensor& dst,
                         const CopyPagesSpecialisation& s) {
  CopyPagesParams params{};
  params.words = s.words;
  params.page_stride = cache.stride(0) * static_cast<int64_t>(cache.element_size()) / s.word_bytes;
  params.src_stride = src.stride(0);
  params.dst_stride = dst.stride(0);
  params.pages = cache.size(0);
  params.page_words = s.page_words;

  Launch launch("copy_pages", copy_pages_defines(s));
  launch.buffers = {
      {COPY_PAGES_CACHE, cache, true}, {COPY_PAGES_SRC, src, false}, {COPY_PAGES_DST, dst, false}};
  launch.set_params(COPY_PAGES_PARAMS, params);
  launch.threadgroups =
      extent(divide_up(s.page_words, COPY_PAGES_THREADS * COPY_PAGES_WORDS), s.copies);
  launch.threads = {COPY_PAGES_THREADS, 1, 1};
  return launch;
}

}  // namespace

void copy_pages(const Tensor& cache, const Tensor& src, const Tensor& dst, Backend& backend) {
  check_copy_pages(cache, src, dst);
  const CopyPagesSpecialisation s = choose_copy_pages(cache, src);
  if (s.launches()) {
    note(backend, [&s] {
      return JsonObject().add("reason", Counted{s.word_bytes, "byte"}.str() + " at a time");
    });
    backend.run(copy_pages_launch(cache, src, dst, s));
  }
}

}  // namespace metal_attn
