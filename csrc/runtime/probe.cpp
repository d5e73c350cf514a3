// Linked together with csrc/runtime/mps.cpp.
#if defined(__APPLE__) || defined(TORCH_METAL_ATTN_FAKE_MPS)

#include "csrc/runtime/probe.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <condition_variable>
#include <cstdio>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "csrc/runtime/callbacks.h"
#include "csrc/runtime/compile_error.h"
#include "csrc/runtime/torch_call.h"
#include "shaders/params/probe.h"

namespace metal_attn {
namespace {

using Values = std::vector<float>;

constexpr std::size_t kSize = PROBE_PRODUCTS + PROBE_LANES;

// The buffer's values before the trial. The kernel adds to them, which tests its reads.
constexpr float kBefore = 1.0f;

Values expected_values() {
  Values values(kSize, kBefore);
  for (int row = 0; row < 8; ++row) {
    for (int column = 0; column < 8; ++column) {
      for (int i = 0; i < 8; ++i) {
        values[static_cast<std::size_t>(8 * row + column)] +=
            static_cast<float>((8 * row + i) * (i - 3 * column));
      }
    }
  }
  int squares = 0;
  for (int lane = 0; lane < PROBE_LANES; ++lane) { squares += lane * lane; }
  for (int lane = 0; lane < PROBE_LANES; ++lane) {
    values[static_cast<std::size_t>(PROBE_PRODUCTS + lane)] +=
        static_cast<float>(squares + (lane ^ 1));
  }
  return values;
}

// M1 and A14 (Metal's family Apple7) are the first chips with SIMD-group sums and matrices. If the
// name is unknown, only the results of the kernel decide.
std::string name_problem() {
  const std::string name = gpu_name();
  char letter = 0;
  int number = 0;
  const bool apple = std::sscanf(name.c_str(), "Apple %c%d", &letter, &number) == 2 &&
                     ((letter == 'M' && number >= 1) || (letter == 'A' && number >= 14));
  return name.empty() || apple
             ? ""
             : "its GPU is '" + name + "', which is not an Apple chip from M1 or A14 on";
}

Tensor allocate(int32_t device_type, int64_t size) {
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_float32(), device_type, 0,
                               &handle) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error(torch_error_text(reinterpret_cast<void*>(&aoti_torch_empty_strided)));
  }
  return Tensor(handle);
}

Tensor on_host(Values& values) {
  const int64_t size = static_cast<int64_t>(values.size());
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_CALL(aoti_torch_create_tensor_from_blob(values.data(), 1, &size, &stride, 0,
                                                aoti_torch_dtype_float32(),
                                                aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// A busy GPU must not look broken. The trial repeats and reports an error that occurs here.
void wait_for_queued_work(int32_t device_type) {
  try {
    Values one(1);
    Tensor host = on_host(one);
    torch::stable::copy_(host, allocate(device_type, 1));
  } catch (...) {}
}

void launch(Backend& mps, const Program& program, const Tensor& values) {
  Launch launch;
  launch.program = program;
  launch.kernel = program.family;
  launch.buffers = {{PROBE_VALUES, values, true}};
  launch.threadgroups = {1, 1, 1};
  launch.threads = {PROBE_LANES, 1, 1};
  mps.run(launch);
}

std::string comparison(const Values& actual) {
  const Values expected = expected_values();
  if (actual == expected) { return ""; }
  if (actual == Values(kSize)) { return "a small kernel on it gave zeros"; }
  std::size_t i = 0;
  while (actual[i] == expected[i]) { ++i; }
  return text_of("a small kernel on it gave ", actual[i], " instead of ", expected[i]);
}

// Stores the results in `host`. Returns the error, or "".
std::string try_kernel(Backend& mps, int32_t device_type, const Program& program, Values& host) {
  const char* failed = "the first allocation on it failed: ";
  try {
    Tensor values = allocate(device_type, static_cast<int64_t>(host.size()));
    failed = "a copy to it failed: ";
    torch::stable::copy_(values, on_host(host));
    failed = "a small kernel on it failed: ";
    launch(mps, program, values);
    failed = "a copy from it failed: ";
    Tensor back = on_host(host);
    torch::stable::copy_(back, values);
    return "";
  } catch (const std::exception& error) {
    return failed + without_prefix(error.what());
  } catch (...) {  // an exception of Objective-C
    return std::string(failed) + "an exception that is not from C++";
  }
}

}  // namespace

std::string try_in_thread(const ProbeSettings& settings, const char* name,
                          std::function<std::string()> trial) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool begun = false;
    bool done = false;
    std::string result;
  };
  const auto shared = std::make_shared<Shared>();
  try {
    std::thread([shared, settings = ProbeSettings(settings), trial = std::move(trial)]() mutable {
      wait_for_queued_work(settings.device_type);
      {
        const std::lock_guard lock(shared->mutex);
        shared->begun = true;
        shared->changed.notify_all();
      }
      std::string result;
      try {
        result = trial();
      } catch (const std::exception& error) {
        result = without_prefix(error.what());
      } catch (...) {  // an exception of Objective-C
        result = "an exception that is not from C++";
      }
      settings.note.reset();  // the process may end as soon as the caller knows the result
      const std::lock_guard lock(shared->mutex);
      shared->result = std::move(result);
      shared->done = true;
      shared->changed.notify_all();
    }).detach();
  } catch (const std::system_error& error) {
    return std::string("no thread could be started for the trial: ") + error.what();
  }
  const auto late = [](const char* subject, std::chrono::milliseconds limit) {
    return std::string(subject) + " did not end within " + std::to_string(limit.count()) + " ms";
  };
  std::unique_lock lock(shared->mutex);
  if (!shared->changed.wait_for(lock, settings.queue_limit, [&] { return shared->begun; })) {
    return late("the GPU's earlier work", settings.queue_limit);
  }
  if (!shared->changed.wait_for(lock, settings.limit, [&] { return shared->done; })) {
    return late(name, settings.limit);
  }
  return shared->result;
}

std::string probe_values(Backend& mps, const ProbeSettings& settings, const Program& program,
                         std::vector<float> values,
                         std::function<std::string(const std::vector<float>&)> compare) {
  return try_in_thread(settings, "a small kernel on it",
                       [&mps, device_type = settings.device_type, program,
                        values = std::move(values), compare]() mutable {
                         const std::string problem = try_kernel(mps, device_type, program, values);
                         return problem.empty() ? compare(values) : problem;
                       });
}

std::string probe(Backend& mps, const ProbeSettings& settings) {
  const std::string problem = name_problem();
  if (!problem.empty()) { return problem; }
  return first_line(probe_values(mps, settings, {"probe", {}}, Values(kSize, kBefore), comparison));
}

}  // namespace metal_attn

#endif
