// metal_logging, of Metal 3.2, and metal_assert. Logs are dropped. A condition is evaluated but not
// asserted.
#pragma once
#include <__msl_types.h>

METAL_FUNC void assert(bool) {}
#define assert(condition) assert(condition)  // for texts that test `#ifdef assert`

#if __METAL_VERSION__ >= 320
namespace metal {

struct os_log {
  constexpr os_log(__text, __text) {}
#define __MSL_LOG(name) \
  template <class... A> \
  METAL_FUNC void name(__text, A...) const {}
  __MSL_LOG(log)
  __MSL_EACH_OF_4(__MSL_LOG, log_debug, log_info, log_error, log_fault)
#undef __MSL_LOG
};
constexpr os_log os_log_default("", "");

}  // namespace metal
#endif
