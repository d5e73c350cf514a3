// Decides once per process if mps can be used.
#if defined(__APPLE__) || defined(TORCH_METAL_ATTN_FAKE_MPS)

#include <pthread.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>
#include <cstdlib>
#include <mutex>

#include "csrc/runtime/callbacks.h"
#include "csrc/runtime/probe.h"

#ifdef TORCH_METAL_ATTN_FAKE_MPS
// Functions of tests/runtime/fake_mps: the device on which the probe allocates, and the limits in
// milliseconds of the probe and of the work queued before it.
extern "C" int32_t fake_mps_device_type();
extern "C" int64_t fake_mps_probe_limit();
extern "C" int64_t fake_mps_queue_limit();
#endif

namespace metal_attn {
namespace {

enum class Verdict { kUnknown, kUsable, kUnusable, kForked };

std::atomic<Verdict> g_verdict{Verdict::kUnknown};

// The parent's Metal objects do not work in the child. If mps was unusable, the reason stays valid.
void after_fork_in_child() {
  if (g_verdict != Verdict::kUnusable) { g_verdict = Verdict::kForked; }
}

// Registers the fork handler at the first use of Metal.
Backend& backend() {
  static Backend& mps = []() -> Backend& {
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
    return unprobed_mps_backend();
  }();
  return mps;
}

bool backend_forced_by_env() {
  const char* chosen = std::getenv("TORCH_METAL_ATTN_BACKEND");
  return chosen != nullptr && std::strcmp(chosen, "mps") == 0;
}

// Written once, before the verdict.
std::string& probe_result() {
  static std::string* const result = new std::string;
  return *result;
}

// The first thread decides, and other threads wait for it.
void decide() {
  if (backend_forced_by_env()) {
    g_verdict = Verdict::kUsable;
    return;
  }
  Backend& mps = backend();  // before the lock, which a forked child could not release
  static std::mutex* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  if (g_verdict == Verdict::kUnknown) {
    probe_result() = probe(mps, probe_settings());
    g_verdict = probe_result().empty() ? Verdict::kUsable : Verdict::kUnusable;
  }
}

// The reason not to use mps, or "".
const char* problem() {
  if (g_verdict == Verdict::kUnknown) { decide(); }
  switch (g_verdict.load()) {
    case Verdict::kForked:
      return "this process was forked after its parent had used the GPU, and Metal does not work "
             "in such a child; start it with multiprocessing.set_start_method(\"spawn\")";
    case Verdict::kUnusable:
      return probe_result().c_str();
    default:
      return "";
  }
}

[[noreturn]] void refuse(const std::string& why) {
  const char* advice = g_verdict == Verdict::kUnusable
                           ? ". torch_metal_attn.simulate() runs the kernels on CPU tensors; "
                             "TORCH_METAL_ATTN_BACKEND=mps uses mps without this test"
                           : "";
  throw std::runtime_error("metal_attn: mps cannot be used: " + why + advice);
}

}  // namespace

#ifdef TORCH_METAL_ATTN_FAKE_MPS
ProbeSettings probe_settings() {
  return {fake_mps_device_type(), std::chrono::milliseconds(fake_mps_probe_limit()),
          std::chrono::milliseconds(fake_mps_queue_limit()), nullptr};
}
#else
// The limits are long enough for a busy Mac to compile the kernel.
ProbeSettings probe_settings() {
  return {aoti_torch_device_type_mps(), std::chrono::seconds(30), std::chrono::minutes(10),
          nullptr};
}
#endif

Backend& mps_backend() {
  if (g_verdict != Verdict::kUsable) {
    if (const char* why = problem(); *why != '\0') { refuse(why); }
  }
  return backend();
}

}  // namespace metal_attn

const char* metal_attn_mps_problem() { return metal_attn::problem(); }

void metal_attn_compile_recorded(int32_t compiles) {
  metal_attn::compiler_of_recorded() = compiles != 0 ? &metal_attn::backend() : nullptr;
}

#endif
