// Stands in for torch's MPS shims where time is measured: every call succeeds and does nothing.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/c/shim_mps.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

struct AOTIMetalShaderLibraryOpaque {};
struct AOTIMetalKernelFunctionOpaque {};

EXPORT void fake_mps_launch_begins() {}

// Nothing computes here, so TORCH_METAL_ATTN_BACKEND=mps must be set.
extern "C" int32_t fake_mps_device_type() { return aoti_torch_device_type_cpu(); }
extern "C" int64_t fake_mps_probe_limit() { return 1000; }

EXPORT AOTITorchError aoti_torch_mps_create_shader_library(const char*,
                                                           AOTIMetalShaderLibraryHandle* library) {
  *library = new AOTIMetalShaderLibraryOpaque;
  return AOTI_TORCH_SUCCESS;
}

EXPORT AOTITorchError aoti_torch_mps_get_kernel_function(AOTIMetalShaderLibraryHandle, const char*,
                                                         AOTIMetalKernelFunctionHandle* kernel) {
  *kernel = new AOTIMetalKernelFunctionOpaque;
  return AOTI_TORCH_SUCCESS;
}

EXPORT AOTITorchError
aoti_torch_mps_run_command_block(AOTIMetalKernelFunctionHandle kernel,
                                 aoti_torch_mps_command_block_callback_t callback, void* data) {
  callback(kernel, data);
  return AOTI_TORCH_SUCCESS;
}

EXPORT AOTITorchError aoti_torch_mps_start_encoding(AOTIMetalKernelFunctionHandle) {
  return AOTI_TORCH_SUCCESS;
}

EXPORT AOTITorchError aoti_torch_mps_set_arg_tensor(AOTIMetalKernelFunctionHandle, unsigned,
                                                    AtenTensorHandle) {
  return AOTI_TORCH_SUCCESS;
}

EXPORT AOTITorchError aoti_torch_mps_dispatch_array_with_group_size(AOTIMetalKernelFunctionHandle,
                                                                    const uint64_t*, size_t,
                                                                    const uint64_t*, size_t) {
  return AOTI_TORCH_SUCCESS;
}

EXPORT AOTITorchError torch_mps_set_arg_bytes(AOTIMetalKernelFunctionHandle, unsigned, const void*,
                                              uint64_t) {
  return AOTI_TORCH_SUCCESS;
}
