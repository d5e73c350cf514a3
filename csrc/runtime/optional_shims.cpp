#include "csrc/runtime/torch_call.h"

#include <dlfcn.h>

namespace metal_attn {

void* find_beside(const void* function, const char* name) {
  Dl_info info{};
  if (dladdr(function, &info) == 0) { return nullptr; }
  void* library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  void* symbol = library == nullptr ? nullptr : dlsym(library, name);
  // dlsym also searches the library's dependencies.
  Dl_info symbol_info{};
  const bool beside = symbol != nullptr && dladdr(symbol, &symbol_info) != 0;
  return beside && symbol_info.dli_fbase == info.dli_fbase ? symbol : nullptr;
}

std::string torch_error_text(const void* function) {
  using Text = const char* (*)();
  const auto text =
      reinterpret_cast<Text>(find_beside(function, "torch_exception_get_what_without_backtrace"));
  return text != nullptr ? text() : kReasonOnStderr;
}

}  // namespace metal_attn
