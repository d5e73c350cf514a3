// Ops on CPU tensors that go through csrc/runtime/mps.cpp, for tests/runtime/test_launch.py.
#include <torch/csrc/stable/library.h>

#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/ops/attention/flash_bwd.h"
#include "csrc/ops/attention/flash_bwd_bias.h"
#include "csrc/ops/attention/flash_fwd.h"
#include "csrc/ops/attention/flex_schema.h"
#include "csrc/ops/attention/schema.h"
#include "csrc/ops/cache/append_kv.h"
#include "csrc/ops/cache/copy_pages.h"
#include "csrc/ops/cache/schema.h"
#include "csrc/ops/common/recorder.h"
#include "csrc/ops/decode/fast_path.h"
#include "csrc/ops/decode/schema.h"
#include "csrc/ops/rope/rope.h"
#include "csrc/ops/rope/schema.h"
#include "csrc/runtime/backend.h"

// Defined in fake_mps.cpp.
extern "C" void fake_mps_launch_begins();
extern "C" const char fake_mps_namespace[];

namespace {

using metal_attn::Launch;
using torch::stable::Tensor;
using torch::stable::detail::StableLibrary;
using torch::stable::detail::StableTorchLibraryInit;

// Runs launches on the fake, and counts what each allocates before its command block.
class Counting final : public metal_attn::Backend {
 public:
  explicit Counting(metal_attn::Backend& mps) : mps_(mps) {}
  void run(const Launch& launch) override {
    fake_mps_launch_begins();
    mps_.run(launch);
  }
  bool is_gpu() const override { return mps_.is_gpu(); }

 private:
  metal_attn::Backend& mps_;
};

metal_attn::Backend& backend() {
  metal_attn::Backend& mps = metal_attn::mps_backend();  // may throw
  static Counting counting(mps);
  return counting;
}

// A launch keeps pointers to texts, so they must live as long as the process.
const char* kept(const std::string& text) {
  static std::mutex mutex;
  static auto* const texts = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  return texts->insert(text).first->c_str();
}

// `defines`: one NAME=VALUE per line. `params`: the bytes of the params.
void launch(std::string family, std::string kernel, std::string defines,
            std::vector<Tensor> buffers, std::vector<int64_t> slots, Tensor params,
            int64_t params_slot, std::vector<int64_t> threadgroups, std::vector<int64_t> threads) {
  Launch launch;
  launch.program.family = kept(family);
  launch.kernel = kept(kernel);
  std::istringstream lines(defines);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t equals = line.find('=');
    launch.program.defines.push_back({kept(line.substr(0, equals)), kept(line.substr(equals + 1))});
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    launch.buffers.push_back({static_cast<uint32_t>(slots.at(i)), buffers[i], true});
  }
  launch.params_slot = static_cast<uint32_t>(params_slot);
  launch.params.set(params.const_data_ptr(), static_cast<std::size_t>(params.numel()));
  for (int i = 0; i < 3; ++i) {
    launch.threadgroups[i] = static_cast<uint32_t>(threadgroups.at(i));
    launch.threads[i] = static_cast<uint32_t>(threads.at(i));
  }
  backend().run(launch);
}

// The ops on the fake, as OP(name, arguments with the parenthesis still open, result, class that
// converts the dispatcher's arguments, function). fake_mps_take_over() puts the ops of FLASH_OPS
// in place of the package's.
#define FLASH_OPS(OP)                                                                   \
  OP(flash_fwd, FLASH_CACHED_ARGUMENTS(), FLASH_FWD_RESULT, FlashFwd, attention_fwd)    \
  OP(flash_decode, FLASH_DECODE_ARGUMENTS, FLASH_FWD_RESULT, FlashDecode, flash_decode) \
  OP(decode_step, DECODE_STEP_ARGUMENTS, FLASH_FWD_RESULT, DecodeStep, decode_step)
#define OTHER_OPS(OP)                                                                            \
  OP(flash_varlen_fwd, FLASH_CACHED_ARGUMENTS(PACKING_SCHEMA), FLASH_FWD_RESULT, FlashVarlenFwd, \
     attention_fwd)                                                                              \
  OP(flex_fwd, FLEX_FWD_ARGUMENTS, FLASH_FWD_RESULT, FlexFwd, attention_fwd)                     \
  OP(flash_bwd, FLASH_BWD_ARGUMENTS(), FLASH_BWD_RESULT, FlashBwd, flash_bwd)                    \
  OP(flash_bwd_bias, FLASH_BWD_BIAS_ARGUMENTS(), "Tensor", FlashBwdBias, flash_bwd_bias)         \
  OP(append_kv, APPEND_KV_ARGUMENTS, "()", AppendKv, append_kv)                                  \
  OP(rope, ROPE_ARGUMENTS, "(Tensor q_rotated, Tensor k_rotated)", Rope, rope)                   \
  OP(rope_, ROPE_INPLACE_ARGUMENTS, "()", Rope, rope_inplace)                                    \
  OP(rope_tables, ROPE_TABLES_ARGUMENTS, "(Tensor cos, Tensor sin)", RopeTables, rope_tables)    \
  OP(copy_pages, COPY_PAGES_ARGUMENTS, "()", CopyPages, copy_pages)

#define DEFINE(NAME, ARGUMENTS, RESULT, FROM, RUN) m.def(#NAME ARGUMENTS ") -> " RESULT);
#define IMPLEMENT(NAME, ARGUMENTS, RESULT, FROM, RUN)                       \
  m.impl(#NAME, TORCH_BOX((&metal_attn::FROM<[](const auto&... arguments) { \
           return metal_attn::RUN(arguments..., backend());                 \
         }>::call)));

#define EXPLAINED_OPS(OP)                                                    \
  FLASH_OPS(OP)                                                              \
  OP(flex_fwd, FLEX_FWD_ARGUMENTS, FLASH_FWD_RESULT, FlexFwd, attention_fwd) \
  OP(flash_bwd, FLASH_BWD_ARGUMENTS(), FLASH_BWD_RESULT, FlashBwd, flash_bwd)
#define DEFINE_EXPLAIN(NAME, ARGUMENTS, RESULT, FROM, RUN) \
  m.def(#NAME "_explain" ARGUMENTS ") -> int[]");
#define IMPLEMENT_EXPLAIN(NAME, ARGUMENTS, RESULT, FROM, RUN)                          \
  m.impl(#NAME "_explain", TORCH_BOX((&metal_attn::FROM<[](const auto&... arguments) { \
           metal_attn::Recorder recorder;                                              \
           metal_attn::RUN(arguments..., recorder);                                    \
           return recorder.packed();                                                   \
         }>::call)));

void define_ops(StableLibrary& m) {
  m.def(
      "launch(str family, str kernel, str defines, Tensor[] buffers, int[] slots, Tensor params, "
      "int params_slot, int[] threadgroups, int[] threads) -> ()");
  EXPLAINED_OPS(DEFINE_EXPLAIN)
  FLASH_OPS(DEFINE)
  OTHER_OPS(DEFINE)
}

void implement_flash(StableLibrary& m) { FLASH_OPS(IMPLEMENT) }

void implement_explained(StableLibrary& m) { EXPLAINED_OPS(IMPLEMENT_EXPLAIN) }

void implement_ops(StableLibrary& m) {
  m.impl("launch", TORCH_BOX(&launch));
  FLASH_OPS(IMPLEMENT)
  OTHER_OPS(IMPLEMENT)
}

// The expansion of STABLE_TORCH_LIBRARY for a namespace that is not known here. All variants share
// this file, because it takes long to compile.
const StableTorchLibraryInit kDefined(StableLibrary::Kind::DEF, &define_ops, fake_mps_namespace,
                                      nullptr, __FILE__, __LINE__);
const StableTorchLibraryInit kImplemented(StableLibrary::Kind::IMPL, &implement_ops,
                                          fake_mps_namespace, "CPU", __FILE__, __LINE__);
const StableTorchLibraryInit kExplained(StableLibrary::Kind::IMPL, &implement_explained,
                                        fake_mps_namespace, "CompositeExplicitAutograd", __FILE__,
                                        __LINE__);

}  // namespace

// Replaces the package's attention ops on the CPU by those of the fake, in the whole process.
extern "C" __attribute__((visibility("default"))) void fake_mps_take_over() {
  constexpr auto kImpl = StableLibrary::Kind::IMPL;
  static const StableTorchLibraryInit ops(kImpl, &implement_flash, "metal_attn", "CPU", __FILE__,
                                          __LINE__);
  static const StableTorchLibraryInit plain(
      kImpl, &metal_attn::FastPath<backend>::implement<StableLibrary>, "metal_attn_fast", "CPU",
      __FILE__, __LINE__);
}
