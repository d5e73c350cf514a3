// Ops on CPU tensors that go through csrc/runtime/mps.cpp, for tests/runtime/test_launch.py.
#include <torch/csrc/stable/library.h>

#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/ops/attention/flex_schema.h"
#include "csrc/ops/attention/schema.h"
#include "csrc/ops/cache/copy_pages.h"
#include "csrc/ops/cache/schema.h"
#include "csrc/ops/decode/plain.h"
#include "csrc/ops/decode/schema.h"
#include "csrc/ops/rope/schema.h"
#include "csrc/runtime/backend.h"

// In fake_mps.cpp.
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

// A launch names things by texts that live as long as the process.
const char* kept(const std::string& text) {
  static std::mutex mutex;
  static auto* const texts = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  return texts->insert(text).first->c_str();
}

// `defines`: a NAME=VALUE a line. `params`: bytes.
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

std::tuple<Tensor, Tensor> flash_fwd(const metal_attn::FlashFwdArguments& arguments) {
  return metal_attn::flash_fwd(arguments, backend());
}

std::tuple<Tensor, Tensor> flash_decode(const metal_attn::FlashDecodeArguments& arguments) {
  return metal_attn::flash_decode(arguments, backend());
}

std::tuple<Tensor, Tensor> decode_step(const metal_attn::DecodeStepArguments& arguments) {
  return metal_attn::decode_step(arguments, backend());
}

metal_attn::FlashGradients flash_bwd(const metal_attn::FlashBwdArguments& a) {
  return metal_attn::flash_bwd(a, backend());
}

Tensor flash_bwd_bias(const metal_attn::FlashBwdBiasArguments& arguments) {
  return metal_attn::flash_bwd_bias(arguments, backend());
}

void append_kv(const metal_attn::AppendKvArguments& arguments) {
  metal_attn::append_kv(arguments, backend());
}

std::tuple<Tensor, Tensor> rope(const metal_attn::RopeArguments& arguments) {
  return metal_attn::rope(arguments, backend());
}

void rope_inplace(const metal_attn::RopeArguments& arguments) {
  metal_attn::rope_inplace(arguments, backend());
}

std::tuple<Tensor, Tensor> rope_tables(const metal_attn::RopeTablesArguments& arguments) {
  return metal_attn::rope_tables(arguments, backend());
}

void copy_pages(const Tensor& cache, const Tensor& src, const Tensor& dst) {
  metal_attn::copy_pages(cache, src, dst, backend());
}

void define_ops(StableLibrary& m) {
  m.def(
      "launch(str family, str kernel, str defines, Tensor[] buffers, int[] slots, Tensor params, "
      "int params_slot, int[] threadgroups, int[] threads) -> ()");
  m.def(metal_attn::kFlashFwd);
  m.def(metal_attn::kFlashVarlenFwd);
  m.def(metal_attn::kFlexFwd);
  m.def(metal_attn::kFlexFwdExplain);
  m.def(metal_attn::kFlashDecode);
  m.def(metal_attn::kDecodeStep);
  m.def(metal_attn::kFlashBwd);
  m.def(metal_attn::kFlashBwdBias);
  m.def(metal_attn::kAppendKv);
  m.def(metal_attn::kRope);
  m.def(metal_attn::kRopeInplace);
  m.def(metal_attn::kRopeTables);
  m.def(metal_attn::kCopyPages);
}

void implement_flash(StableLibrary& m) {
  m.impl("flash_fwd", TORCH_BOX(&metal_attn::FlashFwd<flash_fwd>::dense_cached));
  m.impl("flash_decode", TORCH_BOX(&metal_attn::FlashDecode<flash_decode>::call));
  m.impl("decode_step", TORCH_BOX(&metal_attn::decode_step_op<decode_step>));
}

void implement_ops(StableLibrary& m) {
  m.impl("launch", TORCH_BOX(&launch));
  implement_flash(m);
  m.impl("flash_varlen_fwd", TORCH_BOX(&metal_attn::FlashFwd<flash_fwd>::varlen_cached));
  m.impl("flex_fwd", TORCH_BOX(&metal_attn::FlexFwd<flash_fwd>::call));
  m.impl("flex_fwd_explain", TORCH_BOX(&metal_attn::FlexFwd<metal_attn::flash_fwd_explain>::call));
  m.impl("flash_bwd", TORCH_BOX(&metal_attn::FlashBwd<flash_bwd>::dense));
  m.impl("flash_bwd_bias", TORCH_BOX(&metal_attn::FlashBwdBias<flash_bwd_bias>::dense));
  m.impl("append_kv", TORCH_BOX(&metal_attn::append_kv_op<append_kv>));
  m.impl("rope", TORCH_BOX(&metal_attn::rope_op<rope>));
  m.impl("rope_", TORCH_BOX(&metal_attn::rope_op<rope_inplace>));
  m.impl("rope_tables", TORCH_BOX(&metal_attn::rope_tables_op<rope_tables>));
  m.impl("copy_pages", TORCH_BOX(&copy_pages));
}

// What STABLE_TORCH_LIBRARY expands to, for a namespace that is not known here: this file takes
// long to compile, and so all variants share it.
const StableTorchLibraryInit kDefined(StableLibrary::Kind::DEF, &define_ops, fake_mps_namespace,
                                      nullptr, __FILE__, __LINE__);
const StableTorchLibraryInit kImplemented(StableLibrary::Kind::IMPL, &implement_ops,
                                          fake_mps_namespace, "CPU", __FILE__, __LINE__);

}  // namespace

// From now on the package's ops of attention, on the CPU, are the fake's: in the whole process.
extern "C" __attribute__((visibility("default"))) void fake_mps_take_over() {
  constexpr auto kImpl = StableLibrary::Kind::IMPL;
  static const StableTorchLibraryInit ops(kImpl, &implement_flash, "metal_attn", "CPU", __FILE__,
                                          __LINE__);
  static const StableTorchLibraryInit plain(kImpl,
                                            &metal_attn::Plain<backend>::implement<StableLibrary>,
                                            "metal_attn_plain", "CPU", __FILE__, __LINE__);
}
