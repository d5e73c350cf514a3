// Runs launches on CPU tensors in the simulator: Python compiles the kernel for the host, and the
// engine in csrc/simulator executes it.
#include <pthread.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <mutex>

#include "csrc/runtime/backend.h"
#include "csrc/runtime/callbacks.h"
#include "csrc/runtime/fresh.h"
#include "csrc/runtime/pieces.h"
#include "csrc/runtime/torch_call.h"

namespace metal_attn {
namespace {

// Describes the whole storage, not only the view: a kernel may access all of it.
SimulatorBuffer describe(const BufferArgument& argument) {
  const Tensor& tensor = *argument.tensor;
  int64_t bytes = 0;
  TORCH_CALL(aoti_torch_get_storage_size(tensor.get(), &bytes));
  const uint64_t offset =
      static_cast<uint64_t>(tensor.storage_offset()) * static_cast<uint64_t>(tensor.element_size());
  const void* data = argument.writable ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
  void* storage =
      data == nullptr ? nullptr : const_cast<char*>(static_cast<const char*>(data)) - offset;
  return {argument.slot,
          SPACE_DEVICE,
          argument.writable ? 1u : 0u,
          storage,
          static_cast<uint64_t>(bytes),
          offset,
          initialised_bytes(storage),
          &tensor};
}

// Never destroyed: threads may still launch at exit.
std::mutex& programs_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

class SimulatorBackend final : public Backend {
 public:
  void run(const Launch& launch) override {
    Pieces(launch).each([this](const Launch& piece) { run_piece(piece); });
  }

 private:
  struct Texts {
    std::string defines;
    SimulatedProgram program;  // points to `defines`
  };

  // Python uses the address of the result as a key of compiled programs.
  const SimulatedProgram& simulated(const Program& program) {
    const std::lock_guard lock(programs_mutex());
    Texts& texts = programs_[program];
    if (texts.program.family == nullptr) {
      for (const Define& define : program.defines) {
        texts.defines += std::string(define.name) + "=" + define.value() + "\n";
      }
      texts.program = {program.family, texts.defines.c_str()};
    }
    return texts.program;
  }

  void run_piece(const Launch& launch) {
    const metal_attn_simulate simulate = simulate_callback();
    FixedVector<SimulatorBuffer, kMaxBuffers + 1> buffers;
    for (const BufferArgument& argument : launch.buffers) { buffers.push_back(describe(argument)); }
    if (!launch.params.empty()) {
      void* params = const_cast<std::byte*>(launch.params.data());
      buffers.push_back({launch.params_slot, SPACE_CONSTANT, 0, params, launch.params.size(), 0,
                         nullptr, nullptr});
    }
    int32_t status = METAL_ATTN_NOT_BEGUN;
    simulate(&simulated(launch.program), launch.kernel, buffers.data(),
             static_cast<uint32_t>(buffers.size()), launch.threadgroups.data(),
             launch.threads.data(), &status);
    if (status == METAL_ATTN_NOT_BEGUN) {
      throw std::runtime_error(std::string("metal_attn: interrupted before kernel '") +
                               launch.kernel + "' began");
    }
    if (status != METAL_ATTN_DONE) {
      throw std::runtime_error(std::string("metal_attn: the simulator stopped in kernel '") +
                               launch.kernel + "'");
    }
  }

  ProgramMap<Texts> programs_;
};

}  // namespace

Backend& simulator_backend() {
  // A fork waits until no thread uses the map, so that the child's mutex is unlocked.
  static SimulatorBackend* const backend = [] {
    const auto unlock = [] { programs_mutex().unlock(); };
    pthread_atfork([] { programs_mutex().lock(); }, unlock, unlock);
    return new SimulatorBackend;
  }();
  return *backend;
}

}  // namespace metal_attn

void* metal_attn_hold_tensor(const void* tensor) {
  return new torch::stable::Tensor(*static_cast<const torch::stable::Tensor*>(tensor));
}

void metal_attn_release_tensor(void* held) { delete static_cast<torch::stable::Tensor*>(held); }
