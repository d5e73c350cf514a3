// Ops on CPU tensors that go through csrc/runtime/mps.cpp, for tests/test_launch.py.
#include <torch/csrc/stable/library.h>

#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/ops/append_kv_schema.h"
#include "csrc/ops/decode_step_schema.h"
#include "csrc/ops/flash_fwd_schema.h"
#include "csrc/ops/rope_schema.h"
#include "csrc/runtime/backend.h"

namespace {

using metal_attn::Launch;
using torch::stable::Tensor;

// `defines`: a NAME=VALUE a line. `params`: bytes.
void launch(std::string family, std::string kernel, std::string defines,
            std::vector<Tensor> buffers, std::vector<int64_t> slots, Tensor params,
            int64_t params_slot, std::vector<int64_t> threadgroups, std::vector<int64_t> threads) {
  Launch launch;
  launch.family = family;
  launch.kernel = kernel;
  std::istringstream lines(defines);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t equals = line.find('=');
    launch.defines.push_back({line.substr(0, equals), line.substr(equals + 1)});
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    launch.buffers.push_back({static_cast<uint32_t>(slots.at(i)), buffers[i], true});
  }
  launch.params_slot = static_cast<uint32_t>(params_slot);
  const auto* bytes = static_cast<const std::byte*>(params.const_data_ptr());
  launch.params.assign(bytes, bytes + params.numel());
  for (int i = 0; i < 3; ++i) {
    launch.threadgroups[i] = static_cast<uint32_t>(threadgroups.at(i));
    launch.threads[i] = static_cast<uint32_t>(threads.at(i));
  }
  metal_attn::mps_backend().run(launch);
}

std::tuple<Tensor, Tensor> flash_fwd(const metal_attn::FlashFwdArguments& arguments) {
  return metal_attn::flash_fwd(arguments, metal_attn::mps_backend());
}

std::tuple<Tensor, Tensor> decode_step(const metal_attn::DecodeStepArguments& arguments) {
  return metal_attn::decode_step(arguments, metal_attn::mps_backend());
}

void append_kv(const metal_attn::AppendKvArguments& arguments) {
  metal_attn::append_kv(arguments, metal_attn::mps_backend());
}

std::tuple<Tensor, Tensor> rope(const metal_attn::RopeArguments& arguments) {
  return metal_attn::rope(arguments, metal_attn::mps_backend());
}

void rope_inplace(const metal_attn::RopeArguments& arguments) {
  metal_attn::rope_inplace(arguments, metal_attn::mps_backend());
}

std::tuple<Tensor, Tensor> rope_tables(const metal_attn::RopeTablesArguments& arguments) {
  return metal_attn::rope_tables(arguments, metal_attn::mps_backend());
}

}  // namespace

STABLE_TORCH_LIBRARY(FAKE_NAMESPACE, m) {
  m.def(
      "launch(str family, str kernel, str defines, Tensor[] buffers, int[] slots, Tensor params, "
      "int params_slot, int[] threadgroups, int[] threads) -> ()");
  m.def(metal_attn::kFlashFwd);
  m.def(metal_attn::kFlashVarlenFwd);
  m.def(metal_attn::kDecodeStep);
  m.def(metal_attn::kAppendKv);
  m.def(metal_attn::kRope);
  m.def(metal_attn::kRopeInplace);
  m.def(metal_attn::kRopeTables);
}

STABLE_TORCH_LIBRARY_IMPL(FAKE_NAMESPACE, CPU, m) {
  m.impl("launch", TORCH_BOX(&launch));
  m.impl("flash_fwd", TORCH_BOX(&metal_attn::FlashFwd<flash_fwd>::dense_cached));
  m.impl("flash_varlen_fwd", TORCH_BOX(&metal_attn::FlashFwd<flash_fwd>::varlen_cached));
  m.impl("decode_step", TORCH_BOX(&metal_attn::decode_step_op<decode_step>));
  m.impl("append_kv", TORCH_BOX(&metal_attn::append_kv_op<append_kv>));
  m.impl("rope", TORCH_BOX(&metal_attn::rope_op<rope>));
  m.impl("rope_", TORCH_BOX(&metal_attn::rope_op<rope_inplace>));
  m.impl("rope_tables", TORCH_BOX(&metal_attn::rope_tables_op<rope_tables>));
}
