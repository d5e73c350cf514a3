// Encodes launches on PyTorch's current MPS stream through torch's C functions aoti_torch_mps_*,
// the shims. tests/runtime/fake_mps replaces them on Linux.
#if defined(__APPLE__) || defined(TORCH_METAL_ATTN_FAKE_MPS)

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/c/shim_mps.h>
#include <torch/csrc/stable/ops.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/runtime/backend.h"
#include "csrc/runtime/callbacks.h"
#include "csrc/runtime/compile_error.h"
#include "csrc/runtime/pieces.h"
#include "csrc/runtime/torch_call.h"

namespace metal_attn {
namespace {

using Kernel = AOTIMetalKernelFunctionHandle;

void* const kShims = reinterpret_cast<void*>(&aoti_torch_mps_start_encoding);

// Functions that pass params by value.
struct BytesShims {
  // torch_mps_set_arg_bytes, from torch 2.14 on.
  AOTITorchError (*set_bytes)(Kernel, unsigned, const void*, uint64_t) = nullptr;
  // at::native::mps::MetalKernelFunction::setArg(unsigned, const void*, uint64_t), which torch 2.10
  // to 2.13 export without a declaration. `this` is the handle.
  void (*set_bytes_member)(void*, unsigned, const void*, uint64_t) = nullptr;
};

template <typename Function>
void find(Function& function, const char* name) {
  function = reinterpret_cast<Function>(find_beside(kShims, name));
}

const BytesShims& bytes_shims() {
  static const BytesShims shims = [] {
    BytesShims shims;
    find(shims.set_bytes, "torch_mps_set_arg_bytes");
    find(shims.set_bytes_member, "_ZN2at6native3mps19MetalKernelFunction6setArgEjPKvy");
    return shims;
  }();
  return shims;
}

// Functions that commit the command buffer of torch's stream. There is no C shim for this.
struct CommitShims {
  // at::mps::getCurrentMPSStream() and at::mps::MPSStream::synchronize(at::mps::SyncType), which
  // torch 2.10 to 2.15 export. The latter must be called on the stream's queue.
  void* (*current_stream)() = nullptr;
  void (*synchronize)(void*, int) = nullptr;
  // torch::mps::commit() of torch's C++ API. Before 2.15 it commits only the default stream.
  void (*commit)() = nullptr;

  bool can_synchronize() const { return current_stream != nullptr && synchronize != nullptr; }
};

constexpr int kSyncTypeCommit = 1;  // at::mps::SyncType::COMMIT, which does not wait

const CommitShims& commit_shims() {
  static const CommitShims shims = [] {
    CommitShims shims;
    find(shims.current_stream, "_ZN2at3mps19getCurrentMPSStreamEv");
    find(shims.synchronize, "_ZN2at3mps9MPSStream11synchronizeENS0_8SyncTypeE");
    find(shims.commit, "_ZN5torch3mps6commitEv");
    return shims;
  }();
  return shims;
}

// Throws on an error. action: parts of a description of the call, joined only on an error.
template <typename... Action>
void ok(AOTITorchError error, const Action&... action) {
  if (error != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error(
        text_of("metal_attn: ", action..., " failed: ", torch_error_text(kShims)));
  }
}

std::string library_text(const Program& program) {
  std::string defines;
  for (const Define& define : program.defines) {
    defines += std::string("#define ") + define.name + " " + define.value() + "\n";
  }
  std::string text = shader_text(program.family);
  // Defines follow the includes, as with_defines in torch_metal_attn/runtime/shaders.py puts them.
  const std::size_t head = text.find("#line");
  text.insert(head == std::string::npos ? 0 : head, defines);
  // torch passes the text to Metal as ASCII, which fails for other characters.
  const auto bad = std::find_if(text.begin(), text.end(),
                                [](char c) { return static_cast<unsigned char>(c) > 127; });
  if (bad != text.end()) {
    throw std::runtime_error(std::string("metal_attn: the text of the family '") + program.family +
                             "' is not ASCII at byte " + std::to_string(bad - text.begin()));
  }
  return text;
}

// The params of a launch, as bytes or, without a shim for bytes, as a tensor.
class EncodedParams {
 public:
  explicit EncodedParams(const Launch& launch) : bytes_(launch.params) {
    const BytesShims& shims = bytes_shims();
    if (!bytes_.empty() && shims.set_bytes == nullptr && shims.set_bytes_member == nullptr) {
      tensor_ = on_device(*launch.buffers[0].tensor);
    }
  }

  void encode(Kernel kernel, unsigned slot) const {
    const BytesShims& shims = bytes_shims();
    if (bytes_.empty()) { return; }
    if (shims.set_bytes != nullptr) {
      ok(shims.set_bytes(kernel, slot, bytes_.data(), bytes_.size()), "setting the params");
    } else if (shims.set_bytes_member != nullptr) {
      shims.set_bytes_member(kernel, slot, bytes_.data(), bytes_.size());
    } else {
      ok(aoti_torch_mps_set_arg_tensor(kernel, slot, tensor_->get()), "setting the params");
    }
  }

 private:
  // The copy uses the stream, so it must run outside of the command block.
  Tensor on_device(const Tensor& like) {
    const int64_t size = static_cast<int64_t>(bytes_.size());
    const int64_t stride = 1;
    AtenTensorHandle handle = nullptr;
    TORCH_CALL(aoti_torch_create_tensor_from_blob(const_cast<std::byte*>(bytes_.data()), 1, &size,
                                                  &stride, 0, aoti_torch_dtype_uint8(),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
    Tensor copy = torch::stable::new_empty(like, size, ScalarType::Byte);
    torch::stable::copy_(copy, Tensor(handle));
    return copy;
  }

  const Params& bytes_;
  OptionalTensor tensor_;
};

[[noreturn]] void refuse_dispatch(const Launch& launch) {
  const std::string text = torch_error_text(kShims);
  const std::string why = std::string("dispatching '") + launch.kernel + "' failed: " + text;
  // The message of torch 2.10 to 2.15 if a pipeline's registers leave no room for so many threads.
  // These versions have no other reason to refuse this shim's arguments.
  if (text == kReasonOnStderr || text.find("Threadgroup size exceeds") != std::string::npos) {
    throw CompileError(why + " (" + describe(launch.program) + ")");
  }
  throw std::runtime_error("metal_attn: " + why);
}

void encode(Kernel kernel, const Launch& launch, const EncodedParams& params) {
  ok(aoti_torch_mps_start_encoding(kernel), "encoding '", launch.kernel, "'");
  for (const BufferArgument& argument : launch.buffers) {
    ok(aoti_torch_mps_set_arg_tensor(kernel, argument.slot, argument.tensor->get()),
       "setting buffer ", argument.slot, " of '", launch.kernel, "'");
  }
  params.encode(kernel, launch.params_slot);
  // The shim dispatches threads, not threadgroups.
  uint64_t grid[3];
  uint64_t group[3];
  for (int i = 0; i < 3; ++i) {
    group[i] = launch.threads[i];
    grid[i] = group[i] * launch.threadgroups[i];
  }
  if (aoti_torch_mps_dispatch_array_with_group_size(kernel, grid, 3, group, 3) !=
      AOTI_TORCH_SUCCESS) {
    refuse_dispatch(launch);
  }
}

// Runs `body` on the stream's queue. An exception must not pass through torch's Objective-C frames,
// so it is stored and thrown again. name: of the kernel, for messages.
template <typename Body>
void run_command_block(Kernel kernel, const char* name, const Body& body) {
  struct Block {
    const Body& body;
    std::exception_ptr error;
  } block{body, nullptr};
  ok(aoti_torch_mps_run_command_block(
         kernel,
         [](Kernel, void* data) {
           Block& b = *static_cast<Block*>(data);
           try {
             b.body();
           } catch (...) { b.error = std::current_exception(); }
         },
         &block),
     "running '", name, "'");
  if (block.error != nullptr) { std::rethrow_exception(block.error); }
}

// The estimated seconds of our launches in each stream's open command buffer. torch rarely commits
// and never between kernels, so many short launches would become one long command buffer.
class OpenCommandBuffers {
 public:
  // Commits the current stream's command buffer if `seconds` more would be too long, or if the
  // launch needs a command buffer of its own (alone).
  void make_room(double seconds, bool alone, Kernel kernel, const char* name) {
    double& open = of_current_stream();
    if (alone || (open > 0 && open + seconds > kCommandBufferSeconds)) { commit(kernel, name); }
    open += seconds;
  }

  // Does not wait for the GPU.
  void commit(Kernel kernel, const char* name) {
    of_current_stream() = 0;
    const CommitShims& shims = commit_shims();
    if (shims.can_synchronize()) {
      void* const stream = shims.current_stream();
      run_command_block(kernel, name, [&] { shims.synchronize(stream, kSyncTypeCommit); });
    } else if (shims.commit != nullptr) {
      shims.commit();
    } else {
      static std::once_flag warned;
      std::call_once(warned, [] {
        std::fprintf(
            stderr,
            "torch_metal_attn: this version of torch cannot commit its MPS stream, so macOS may "
            "end attention that takes seconds, and its results may be wrong: compute fewer heads "
            "or queries at a time\n");
      });
    }
  }

 private:
  double& of_current_stream() {
    const auto current = commit_shims().current_stream;
    void* const stream = current != nullptr ? current() : nullptr;
    for (auto& [known, open] : streams_) {
      if (known == stream) { return open; }
    }
    return streams_.emplace_back(stream, 0.0).second;
  }

  std::vector<std::pair<void*, double>> streams_;  // torch has at most 33
};

#ifdef TORCH_METAL_ATTN_FAKE_MPS
extern "C" int64_t fake_mps_milliseconds();
int64_t milliseconds() { return fake_mps_milliseconds(); }
#else
int64_t milliseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}
#endif

// A compiled specialisation, or the errors of its compilation.
struct Library {
  std::mutex compiling;  // locked while Metal compiles: for minutes, or forever
  AOTIMetalShaderLibraryHandle handle = nullptr;
  std::map<std::string, std::string> errors;  // by kernel; the error of the whole text has key ""

  // Protected by the backend's lock. A family has one or two kernels.
  std::vector<std::pair<const char*, Kernel>> kernels;
};

class MpsBackend final : public Backend {
 public:
  bool is_gpu() const override { return true; }

  void run(const Launch& launch) override {
    const Pieces pieces(launch);
    // A single threadgroup cannot be divided, but it can have a separate command buffer.
    const bool many = pieces.count() > 1 || pieces.seconds() > kCommandBufferSeconds;
    Kernel kernel = nullptr;
    pieces.each([&](const Launch& piece) { kernel = run_piece(piece, pieces.seconds(), many); });
    if (many) {
      const std::lock_guard lock(mutex_);
      open_.commit(kernel, launch.kernel);
    }
  }

  bool compile(const Launch& launch) override {
    const Pieces pieces(launch);
    const Launch first = pieces.count() > 1 ? pieces.piece({0, 0, 0}) : launch;
    std::unique_lock lock(mutex_);
    Library& library = libraries_[first.program];
    lock.unlock();
    bool is_new = false;
    compiled(library, first, is_new);
    return is_new;
  }

 private:
  Kernel run_piece(const Launch& launch, double seconds, bool alone) {
    const EncodedParams params(launch);
    // A kernel object has one encoder, so command blocks must not run concurrently.
    std::unique_lock lock(mutex_);
    Library& library = libraries_[launch.program];
    Kernel kernel = find_kernel(library, launch.kernel);
    if (kernel == nullptr) {
      lock.unlock();
      const int64_t begun = milliseconds();
      bool is_new = false;
      kernel = compiled(library, launch, is_new);
      if (is_new) { warn_if_slow(launch.kernel, milliseconds() - begun); }
      lock.lock();
    }
    open_.make_room(seconds, alone, kernel, launch.kernel);
    run_command_block(kernel, launch.kernel, [&] { encode(kernel, launch, params); });
    return kernel;
  }

  // Null if the kernel is not compiled. Allocates nothing.
  static Kernel find_kernel(const Library& library, const char* name) {
    for (const auto& [compiled_name, kernel] : library.kernels) {
      if (same_text(compiled_name, name)) { return kernel; }
    }
    return nullptr;
  }

  // Called without the backend's lock, so that other kernels run while Metal compiles this one. The
  // library's lock is enough: torch changes only the library, which has no lock before torch 2.15.
  // A failed compilation is not repeated.
  Kernel compiled(Library& library, const Launch& launch, bool& is_new) {
    const std::lock_guard alone(library.compiling);
    {
      const std::lock_guard lock(mutex_);
      // Another thread may have compiled the kernel in the meantime.
      if (const Kernel kernel = find_kernel(library, launch.kernel)) { return kernel; }
    }
    for (const char* failed : {"", launch.kernel}) {  // keys of Library::errors
      if (const auto error = library.errors.find(failed); error != library.errors.end()) {
        throw CompileError(error->second);
      }
    }
    if (library.handle == nullptr) {
      const std::string text = library_text(launch.program);
      if (aoti_torch_mps_create_shader_library(text.c_str(), &library.handle) !=
          AOTI_TORCH_SUCCESS) {
        library.handle = nullptr;
        fail(library, "", compile_error(launch.program, text, torch_error_text(kShims)));
      }
    }
    Kernel kernel = nullptr;
    if (aoti_torch_mps_get_kernel_function(library.handle, launch.kernel, &kernel) !=
        AOTI_TORCH_SUCCESS) {
      fail(library, launch.kernel,
           std::string("compiling '") + launch.kernel + "' of " + describe(launch.program) +
               " for this GPU failed: " + torch_error_text(kShims));
    }
    const std::lock_guard lock(mutex_);
    library.kernels.emplace_back(launch.kernel, kernel);
    is_new = true;
    return kernel;
  }

  [[noreturn]] static void fail(Library& library, const char* failed, const std::string& error) {
    library.errors[failed] = error;
    throw CompileError(error);
  }

  std::mutex mutex_;
  OpenCommandBuffers open_;
  ProgramMap<Library> libraries_;
};

}  // namespace

Backend& unprobed_mps_backend() {
  // Never destroyed: at exit, Metal may be destroyed first, and threads may still launch.
  static MpsBackend* const backend = new MpsBackend;
  return *backend;
}

}  // namespace metal_attn

#endif
