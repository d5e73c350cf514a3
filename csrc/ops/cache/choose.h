// How the kernels of append_kv and copy_pages are specialised, and their grids.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>

#include "csrc/ops/rope/rotation.h"
#include "csrc/problem/cache.h"
#include "csrc/runtime/launch.h"

namespace metal_attn {

// Columns of new rows that a thread moves at a time.
inline constexpr int kUnitColumns = 8;

// Which of its loads and stores are whole.
struct AppendWidths {
  bool loads;
  bool stores;
  bool rotary;  // if loads are
};

AppendWidths append_widths(const AppendKvArguments& arguments, const AppendKvProblem& problem);

struct AppendKvSpecialisation {
  AppendWidths widths;
  int vector;  // pairs of q that a thread rotates
  HeadShares q_shares;
  int32_t block_rows;
  int32_t block_tokens;
  std::array<uint32_t, 3> threadgroups;
  uint32_t threads;
};

// Throws std::invalid_argument for a grid that Metal cannot count.
AppendKvSpecialisation choose_append_kv(const AppendKvArguments& arguments,
                                        const AppendKvProblem& problem);

Defines append_kv_defines(const AppendKvArguments& arguments, const AppendKvProblem& problem,
                          const AppendKvSpecialisation& specialisation);

struct CopyPagesSpecialisation {
  int64_t copies;
  int64_t word_bytes;
  bool long_indices;
  RowDims words;  // of a page
  uint32_t page_words;

  bool launches() const { return copies > 0 && page_words > 0; }
};

// Throws std::invalid_argument for pages of more words than Metal can count.
CopyPagesSpecialisation choose_copy_pages(const torch::stable::Tensor& cache,
                                          const torch::stable::Tensor& src);

Defines copy_pages_defines(const CopyPagesSpecialisation& specialisation);

// Of a call that launches.
std::array<uint32_t, 3> copy_pages_threadgroups(const CopyPagesSpecialisation& specialisation);

}  // namespace metal_attn
