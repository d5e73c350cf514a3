// Encodes launches on PyTorch's current MPS stream: the only file that knows torch's MPS shims.
//
// The shims are torch's C functions aoti_torch_mps_*, so that one binary serves every torch from
// 2.10. tests/fake_mps stands in for them on Linux.
#if defined(__APPLE__) || defined(TORCH_METAL_ATTN_FAKE_MPS)

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/c/shim_mps.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

#include "csrc/runtime/backend.h"
#include "csrc/runtime/callbacks.h"
#include "csrc/runtime/torch_call.h"

namespace metal_attn {
namespace {

using torch::stable::Tensor;
using Kernel = AOTIMetalKernelFunctionHandle;

// What newer torch versions have beyond 2.10, and what 2.10 to 2.13 have without declaring it.
// Looked up in the library that the shims come from, whatever else the process has loaded.
struct OptionalShims {
  // torch_mps_set_arg_bytes, from 2.14.
  AOTITorchError (*set_bytes)(Kernel, unsigned, const void*, uint64_t) = nullptr;
  // at::native::mps::MetalKernelFunction::setArg(unsigned, const void*, uint64_t), which those
  // shims call themselves, with the handle as `this`.
  void (*set_bytes_member)(void*, unsigned, const void*, uint64_t) = nullptr;
  // torch_exception_get_what_without_backtrace, from 2.13.
  const char* (*error_text)() = nullptr;
};

OptionalShims find_optional_shims() {
  OptionalShims shims;
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&aoti_torch_mps_start_encoding), &info) == 0) {
    return shims;
  }
  void* library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return shims;
  }
  const auto find = [library](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
  };
  find(shims.set_bytes, "torch_mps_set_arg_bytes");
  find(shims.set_bytes_member, "_ZN2at6native3mps19MetalKernelFunction6setArgEjPKvy");
  find(shims.error_text, "torch_exception_get_what_without_backtrace");
  return shims;
}

const OptionalShims& optional_shims() {
  static const OptionalShims shims = find_optional_shims();
  return shims;
}

void ok(AOTITorchError error, const std::string& doing) {
  if (error == AOTI_TORCH_SUCCESS) {
    return;
  }
  const auto error_text = optional_shims().error_text;
  throw std::runtime_error("metal_attn: " + doing + " failed: " +
                           (error_text != nullptr ? error_text() : "torch said why on stderr"));
}

std::string library_text(const Launch& launch) {
  std::string text;
  for (const Define& define : launch.defines) {
    text += "#define " + define.name + " " + define.value + "\n";
  }
  text += shader_source(launch.family);
  // torch hands the text to Metal as ASCII and would get no string at all.
  const auto bad = std::find_if(text.begin(), text.end(),
                                [](char c) { return static_cast<unsigned char>(c) > 127; });
  if (bad != text.end()) {
    throw std::runtime_error("metal_attn: the text of the family '" + launch.family +
                             "' is not ASCII at byte " + std::to_string(bad - text.begin()));
  }
  return text;
}

std::string library_name(const Launch& launch) {
  std::string name = launch.family;
  for (const Define& define : launch.defines) {
    name += " " + define.name + "=" + define.value;
  }
  return name;
}

class Params {
 public:
  explicit Params(const Launch& launch) : bytes_(launch.params) {
    if (bytes_.size() > kMaxParamsBytes) {
      throw std::invalid_argument("metal_attn: " + std::to_string(bytes_.size()) +
                                  " bytes of params; Metal takes at most " +
                                  std::to_string(kMaxParamsBytes));
    }
    const OptionalShims& shims = optional_shims();
    if (!bytes_.empty() && shims.set_bytes == nullptr && shims.set_bytes_member == nullptr) {
      tensor_ = on_device(launch.buffers.at(0).tensor);
    }
  }

  void encode(Kernel kernel, unsigned slot) const {
    const OptionalShims& shims = optional_shims();
    if (bytes_.empty()) {
      return;
    }
    if (shims.set_bytes != nullptr) {
      ok(shims.set_bytes(kernel, slot, bytes_.data(), bytes_.size()), "setting the params");
    } else if (shims.set_bytes_member != nullptr) {
      shims.set_bytes_member(kernel, slot, bytes_.data(), bytes_.size());
    } else {
      ok(aoti_torch_mps_set_arg_tensor(kernel, slot, tensor_->get()), "setting the params");
    }
  }

 private:
  // Copied before the command block opens: the copy uses the stream itself.
  Tensor on_device(const Tensor& like) {
    const int64_t size = static_cast<int64_t>(bytes_.size());
    const int64_t stride = 1;
    AtenTensorHandle handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
        const_cast<std::byte*>(bytes_.data()), 1, &size, &stride, 0, aoti_torch_dtype_uint8(),
        aoti_torch_device_type_cpu(), 0, &handle));
    Tensor copy = torch::stable::new_empty(like, size, torch::headeronly::ScalarType::Byte);
    torch::stable::copy_(copy, Tensor(handle));
    return copy;
  }

  const std::vector<std::byte>& bytes_;
  std::optional<Tensor> tensor_;
};

void encode(Kernel kernel, const Launch& launch, const Params& params) {
  ok(aoti_torch_mps_start_encoding(kernel), "encoding '" + launch.kernel + "'");
  for (const BufferArgument& argument : launch.buffers) {
    ok(aoti_torch_mps_set_arg_tensor(kernel, argument.slot, argument.tensor.get()),
       "setting buffer " + std::to_string(argument.slot) + " of '" + launch.kernel + "'");
  }
  params.encode(kernel, launch.params_slot);
  // The shim dispatches threads, not threadgroups.
  uint64_t grid[3];
  uint64_t group[3];
  for (int i = 0; i < 3; ++i) {
    group[i] = launch.threads[i];
    grid[i] = group[i] * launch.threadgroups[i];
  }
  ok(aoti_torch_mps_dispatch_array_with_group_size(kernel, grid, 3, group, 3),
     "dispatching '" + launch.kernel + "'");
}

// Runs `encode` on the stream's queue. An exception must not pass through torch's Objective-C
// frames, so it is carried over them.
void run_command_block(Kernel kernel, const Launch& launch, const Params& params) {
  struct Block {
    const Launch& launch;
    const Params& params;
    std::exception_ptr error;
  } block{launch, params, nullptr};
  ok(aoti_torch_mps_run_command_block(
         kernel,
         [](Kernel k, void* data) {
           Block& b = *static_cast<Block*>(data);
           try {
             encode(k, b.launch, b.params);
           } catch (...) {
             b.error = std::current_exception();
           }
         },
         &block),
     "running '" + launch.kernel + "'");
  if (block.error != nullptr) {
    std::rethrow_exception(block.error);
  }
}

class MpsBackend final : public Backend {
 public:
  void run(const Launch& launch) override {
    const Params params(launch);
    const AOTIMetalShaderLibraryHandle library = library_for(launch);
    // A kernel object holds its encoder, and torch's own tables have no lock before 2.15.
    const std::lock_guard lock(mutex_);
    run_command_block(kernel_for(library, launch), launch, params);
  }

 private:
  AOTIMetalShaderLibraryHandle library_for(const Launch& launch) {
    const std::string name = library_name(launch);
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = libraries_.find(name); found != libraries_.end()) {
        return found->second;
      }
    }
    // Python gives the text, and may wait there for the interpreter's lock: not under ours.
    const std::string text = library_text(launch);
    const std::lock_guard lock(mutex_);
    if (const auto found = libraries_.find(name); found != libraries_.end()) {
      return found->second;  // another thread was first
    }
    AOTIMetalShaderLibraryHandle library = nullptr;
    ok(aoti_torch_mps_create_shader_library(text.c_str(), &library), "compiling " + name);
    libraries_.emplace(name, library);
    return library;
  }

  Kernel kernel_for(AOTIMetalShaderLibraryHandle library, const Launch& launch) {
    const auto key = std::make_pair(library, launch.kernel);
    if (const auto found = kernels_.find(key); found != kernels_.end()) {
      return found->second;
    }
    Kernel kernel = nullptr;
    ok(aoti_torch_mps_get_kernel_function(library, launch.kernel.c_str(), &kernel),
       "finding the kernel '" + launch.kernel + "' in " + launch.family);
    kernels_.emplace(key, kernel);
    return kernel;
  }

  std::mutex mutex_;
  std::map<std::string, AOTIMetalShaderLibraryHandle> libraries_;
  std::map<std::pair<AOTIMetalShaderLibraryHandle, std::string>, Kernel> kernels_;
};

}  // namespace

Backend& mps_backend() {
  // Never destroyed: at exit Metal may be gone before us, and threads may still launch.
  static MpsBackend* const backend = new MpsBackend;
  return *backend;
}

}  // namespace metal_attn

#endif
