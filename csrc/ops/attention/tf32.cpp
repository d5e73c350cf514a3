#include "csrc/ops/attention/tensor_tiles.h"

#include <atomic>
#include <exception>

#include "csrc/ops/common/check.h"
#include "csrc/runtime/callbacks.h"

namespace metal_attn {
namespace {

constexpr char kSetting[] = "TORCH_METAL_ATTN_TF32";

// One value for all threads, because autograd's threads compute gradients.
std::atomic<int32_t> g_allowed{METAL_ATTN_TF32_BY_SETTING};

bool setting() {
  const std::string_view value = environment(kSetting, "off");
  check(value == "off" || value == "on", kSetting, " is '", value, "'; it must be off or on");
  return value == "on";
}

}  // namespace

bool tf32_allowed() {
  const int32_t allowed = g_allowed;
  return allowed == METAL_ATTN_TF32_BY_SETTING ? setting() : allowed == METAL_ATTN_TF32_ALLOWED;
}

std::string tf32_reason() {
  if (!tf32_allowed()) { return "TF32 is not allowed"; }
  return g_allowed == METAL_ATTN_TF32_BY_SETTING ? std::string(kSetting) + " is on"
                                                 : "allow_tf32 allows TF32";
}

std::string describe_tf32(Element element, bool tensor_tiles) {
  return element == Element::kFloat && tensor_tiles
             ? "float32 is rounded to 11 bits, as " + tf32_reason()
             : "";
}

}  // namespace metal_attn

int32_t metal_attn_allow_tf32(int32_t allowed) { return metal_attn::g_allowed.exchange(allowed); }

int32_t metal_attn_tf32_allowed() {
  try {
    return metal_attn::tf32_allowed() ? 1 : 0;
  } catch (const std::invalid_argument&) { return -1; }
}

const char* metal_attn_tf32_reason() {
  static thread_local std::string reason;
  try {
    reason = metal_attn::tf32_reason();
  } catch (const std::exception& error) { reason = metal_attn::first_line(error.what()); }
  return reason.c_str();
}
