// A fake of torch's MPS shims, so that csrc/runtime/mps.cpp runs on Linux.
//
// It records every call, refuses what torch and Metal refuse, and can be told to fail. With
// count_malloc.cpp preloaded it also counts the allocations of each launch before its block.
// FAKE_NAMESPACE is the namespace of the ops in driver.cpp. FAKE_SET_BYTES and FAKE_MEMBER each
// provide one optional way to set bytes, and one to commit a command buffer. With FAKE_QUIET each
// call succeeds and does as little as possible, for measurements.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/c/shim_mps.h>

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>

// Null unless count_malloc.cpp is preloaded.
extern "C" __attribute__((weak)) uint64_t counted_allocations();

#define EXPORT extern "C" __attribute__((visibility("default")))

struct AOTIMetalShaderLibraryOpaque {
  std::string text;
};

struct AOTIMetalKernelFunctionOpaque {
  std::string name;
  std::string text;
  void* buffers[31] = {};
  bool in_block = false;
  bool encoding = false;
};

namespace {

constexpr unsigned kSlots = 31;
#ifdef FAKE_QUIET
constexpr bool kQuiet = true;
#else
constexpr bool kQuiet = false;
#endif

std::mutex g_mutex;
std::string g_log;
std::string g_failing;  // the name of the shim that fails
std::string g_failure;  // the message of the failure
int g_good_calls = 0;   // successful calls of the shim before it fails
int g_stream = 0;
int g_streams[33];  // the addresses stand for streams
thread_local std::string t_error;
std::string g_last_text;
// Runs a dispatch, with the shader's text and the memory of each buffer. May be null.
void (*g_gpu)(const char*, void* const*) = nullptr;
std::string g_refused;  // texts that contain this are refused
int g_refusing = 0;     // the Stage that refuses them
// Called before a text is compiled. May be null.
void (*g_compiler)(const char*) = nullptr;
int32_t g_device_type = aoti_torch_device_type_cpu();
int64_t g_probe_limit = 600000;
int64_t g_queue_limit = 600000;
std::atomic<int64_t> g_milliseconds{0};  // the time that compilations took
std::string g_allocations;               // how many each launch made, one per line
thread_local uint64_t t_launch_begins = 0;
std::atomic<int> g_blocks{0};
std::atomic<bool> g_overlapped{false};

void record(const std::string& line) {
  const std::lock_guard lock(g_mutex);
  g_log += line + "\n";
}

// Runs `body` like torch's shims, which convert exceptions to an error code and a text.
template <typename Body>
AOTITorchError shim(const char* name, const Body& body) {
  if (kQuiet) { return 0; }
  try {
    if (g_failing == name && g_good_calls-- <= 0) { throw std::runtime_error(g_failure); }
    body();
    return 0;
  } catch (const std::exception& error) {
    t_error = error.what();
    return 1;
  }
}

void require(bool condition, const char* message) {
  if (!condition) { throw std::runtime_error(message); }
}

// The stages that can refuse a text.
enum Stage { kText, kPipeline, kDispatch };

void accept(Stage stage, const std::string& text, const char* message) {
  const bool refused = !g_refused.empty() && text.find(g_refused) != std::string::npos;
  require(stage != g_refusing || !refused, message);
}

std::string hex(const void* data, uint64_t size) {
  std::string text;
  for (uint64_t i = 0; i < size; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char*>(data)[i]);
    text += digits;
  }
  return text;
}

[[maybe_unused]] void set_bytes(const char* how, void* kernel, unsigned slot, const void* data,
                                uint64_t size) {
  require(static_cast<AOTIMetalKernelFunctionHandle>(kernel)->encoding, "not encoding");
  require(slot < kSlots && size > 0 && size <= 4096, "bad bytes");
  record(std::string(how) + " " + std::to_string(slot) + " " + hex(data, size));
}

}  // namespace

EXPORT AOTITorchError aoti_torch_mps_create_shader_library(const char* text,
                                                           AOTIMetalShaderLibraryHandle* library) {
  if (kQuiet) { *library = new AOTIMetalShaderLibraryOpaque{text}; }
  if (g_compiler != nullptr) { g_compiler(text); }
  return shim("create_shader_library", [&] {
    const std::string whole = text;
    {
      const std::lock_guard lock(g_mutex);
      g_last_text = whole;
    }
    for (unsigned char c : whole) { require(c < 128, "the text is not ASCII"); }
    accept(kText, whole, "program_source:1:1: error: the text was told to be refused");
    *library = new AOTIMetalShaderLibraryOpaque{text};
    record("library");
  });
}

EXPORT AOTITorchError aoti_torch_mps_get_kernel_function(AOTIMetalShaderLibraryHandle library,
                                                         const char* name,
                                                         AOTIMetalKernelFunctionHandle* kernel) {
  if (kQuiet) { *kernel = new AOTIMetalKernelFunctionOpaque{name, library->text}; }
  return shim("get_kernel_function", [&] {
    bool found = false;
    for (const char* declared : {" void ", " void\n"}) {  // a long signature begins a line
      found = found || library->text.find(std::string(declared) + name + "(") != std::string::npos;
    }
    require(found, "no such kernel");
    accept(kPipeline, library->text,
           "Failed to created pipeline state object, error: Error Domain=AGXMetalG13X Code=3 "
           "\"Compute function exceeds available temporary registers\"");
    *kernel = new AOTIMetalKernelFunctionOpaque{name, library->text};
    record(std::string("kernel ") + name);
  });
}

EXPORT AOTITorchError
aoti_torch_mps_run_command_block(AOTIMetalKernelFunctionHandle kernel,
                                 aoti_torch_mps_command_block_callback_t callback, void* data) {
  if (kQuiet) { callback(kernel, data); }
  if (counted_allocations != nullptr) {
    const uint64_t allocations = counted_allocations() - t_launch_begins;
    g_allocations += std::to_string(allocations) + "\n";
  }
  return shim("run_command_block", [&] {
    if (g_blocks.fetch_add(1) != 0) { g_overlapped = true; }
    record(g_stream == 0 ? "block" : "block on " + std::to_string(g_stream));
    kernel->in_block = true;
    try {
      callback(kernel, data);
    } catch (...) { record("an exception crossed the block"); }
    usleep(1000);  // time for another thread to enter this block
    kernel->in_block = kernel->encoding = false;
    record("end");
    g_blocks.fetch_sub(1);
  });
}

EXPORT AOTITorchError aoti_torch_mps_start_encoding(AOTIMetalKernelFunctionHandle kernel) {
  return shim("start_encoding", [&] {
    require(kernel->in_block, "not in a command block");
    kernel->encoding = true;
    record("start " + kernel->name);
  });
}

// Records the contents of byte tensors, which are params, and the addresses of others.
EXPORT AOTITorchError aoti_torch_mps_set_arg_tensor(AOTIMetalKernelFunctionHandle kernel,
                                                    unsigned slot, AtenTensorHandle tensor) {
  return shim("set_arg_tensor", [&] {
    require(kernel->encoding, "not encoding");
    require(slot < kSlots, "bad slot");
    void* data = nullptr;
    int64_t size = 0;
    int32_t dtype = 0;
    aoti_torch_get_data_ptr(tensor, &data);
    kernel->buffers[slot] = data;
    aoti_torch_get_numel(tensor, &size);
    aoti_torch_get_dtype(tensor, &dtype);
    std::ostringstream line;
    if (dtype == aoti_torch_dtype_uint8()) {
      line << "byte_tensor " << slot << " " << hex(data, size);
    } else {
      line << "tensor " << slot << " " << reinterpret_cast<uintptr_t>(data);
    }
    record(line.str());
  });
}

EXPORT AOTITorchError aoti_torch_mps_dispatch_array_with_group_size(
    AOTIMetalKernelFunctionHandle kernel, const uint64_t* grid, size_t grid_size,
    const uint64_t* group, size_t group_size) {
  return shim("dispatch", [&] {
    require(kernel->encoding, "not encoding");
    require(grid_size == 3 && group_size == 3, "not three dimensions");
    accept(kDispatch, kernel->text, "Threadgroup size exceeds 24 limit");
    std::ostringstream line;
    line << "dispatch " << grid[0] << " " << grid[1] << " " << grid[2] << " / " << group[0] << " "
         << group[1] << " " << group[2];
    record(line.str());
    if (g_gpu != nullptr) { g_gpu(kernel->text.c_str(), kernel->buffers); }
  });
}

#ifdef FAKE_SET_BYTES
EXPORT AOTITorchError torch_mps_set_arg_bytes(AOTIMetalKernelFunctionHandle kernel, unsigned slot,
                                              const void* data, uint64_t size) {
  return shim("set_arg_bytes", [&] { set_bytes("bytes", kernel, slot, data, size); });
}
#endif

#ifdef FAKE_MEMBER
EXPORT void _ZN2at6native3mps19MetalKernelFunction6setArgEjPKvy(void* kernel, unsigned slot,
                                                                const void* data, uint64_t size) {
  require(g_failing != "setArg", "setArg was told to fail");
  set_bytes("member", kernel, slot, data, size);
}
#endif

// A commit ends a command buffer. MPSStream::synchronize (torch 2.10 and later) must run on the
// stream's queue. torch::mps::commit() waits for this queue, so it must run outside of all blocks.
#ifdef FAKE_SET_BYTES
EXPORT void* _ZN2at3mps19getCurrentMPSStreamEv() { return &g_streams[g_stream]; }
EXPORT void _ZN2at3mps9MPSStream11synchronizeENS0_8SyncTypeE(int* stream, int type) {
  require(g_blocks == 1, "not on the stream's queue");
  require(type == 1, "not SyncType::COMMIT");
  record("commit of " + std::to_string(stream - g_streams));
}
#elif defined(FAKE_MEMBER)
EXPORT void _ZN5torch3mps6commitEv() {
  require(g_blocks == 0, "the stream's queue would wait for itself");
  record("commit");
}
#endif

#if defined(FAKE_SET_BYTES) || defined(FAKE_MEMBER)  // the other variant is torch 2.10
EXPORT const char* torch_exception_get_what_without_backtrace() { return t_error.c_str(); }
#endif

extern "C" const char fake_mps_namespace[] = FAKE_NAMESPACE;

EXPORT void fake_mps_launch_begins() {
  if (counted_allocations != nullptr) { t_launch_begins = counted_allocations(); }
}

// Called by csrc/runtime/mps_verdict.cpp.
extern "C" int32_t fake_mps_device_type() { return g_device_type; }
extern "C" int64_t fake_mps_probe_limit() { return g_probe_limit; }
extern "C" int64_t fake_mps_queue_limit() { return g_queue_limit; }

// Called by csrc/runtime/mps.cpp.
extern "C" int64_t fake_mps_milliseconds() { return g_milliseconds; }

// Called by the tests.
EXPORT void fake_mps_set_gpu(void (*gpu)(const char*, void* const*)) { g_gpu = gpu; }
EXPORT void fake_mps_set_compiler(void (*compiler)(const char*)) { g_compiler = compiler; }
EXPORT void fake_mps_refuse(const char* part, int stage) {
  g_refused = part;
  g_refusing = stage;
}
EXPORT void fake_mps_set_device_type(int32_t type) { g_device_type = type; }
EXPORT void fake_mps_set_probe_limit(int64_t milliseconds) { g_probe_limit = milliseconds; }
EXPORT void fake_mps_set_queue_limit(int64_t milliseconds) { g_queue_limit = milliseconds; }
EXPORT void fake_mps_pass_time(int64_t milliseconds) { g_milliseconds += milliseconds; }
EXPORT const char* fake_mps_allocations() { return g_allocations.c_str(); }
EXPORT const char* fake_mps_log() { return g_log.c_str(); }
EXPORT const char* fake_mps_last_text() { return g_last_text.c_str(); }
EXPORT bool fake_mps_overlapped() { return g_overlapped; }
EXPORT void fake_mps_clear() {
  g_log.clear();
  g_allocations.clear();
  g_overlapped = false;
}
EXPORT void fake_mps_fail(const char* shim_name, const char* failure, int good_calls) {
  g_failing = shim_name;
  g_failure = failure;
  g_good_calls = good_calls;
}
EXPORT void fake_mps_set_stream(int stream) { g_stream = stream; }
