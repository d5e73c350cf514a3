#include "csrc/ops/attention/tensor_tiles.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <string_view>
#include <system_error>

#include "csrc/ops/attention/tensor_check.h"
#include "csrc/ops/common/check.h"
#include "csrc/runtime/callbacks.h"
#include "csrc/runtime/compile_error.h"
#include "csrc/runtime/probe.h"
#include "csrc/runtime/probe_tensor.h"

namespace metal_attn {
namespace {

constexpr char kSetting[] = "TORCH_METAL_ATTN_TENSOR_TILES";

enum class Setting { kOff, kAuto, kOn };

Setting setting() {
  const char* given = std::getenv(kSetting);
  const std::string_view value = given == nullptr ? "auto" : given;
  check(value == "off" || value == "auto" || value == "on", kSetting, " is '", value,
        "'; it must be off, auto or on");
  return value == "off" ? Setting::kOff : value == "on" ? Setting::kOn : Setting::kAuto;
}

// What does not depend on a trial.
bool wanted() {
  const Setting chosen = setting();
  return chosen == Setting::kOn || (chosen == Setting::kAuto && gpu().family >= kTensorFamily);
}

// Why not.
std::string unwanted() {
  if (setting() == Setting::kOff) {
    return std::string(kSetting) + " is off";
  }
  const std::string name = gpu_name();
  return "M5 is the first GPU with matrix units, and this is " +
         (name.empty() ? "none that torch names" : "an " + name);
}

struct Verdict {
  std::mutex mutex;
  std::optional<std::string> problem;  // none: not tried yet
};

// Never destroyed: at exit threads may still launch.
Verdict& verdict() {
  static Verdict* const verdict = new Verdict;
  return *verdict;
}

void warn(const std::string& why) {
  std::fprintf(stderr,
               "torch_metal_attn: attention uses 8x8 tiles, not tensor tiles: %s\n"
               "torch_metal_attn: please report this with what `python -m torch_metal_attn verify "
               "--full` writes; %s=off silences it\n",
               why.c_str(), kSetting);
}

#if defined(__APPLE__) || defined(TORCH_METAL_ATTN_FAKE_MPS)

// An empty file says that an earlier process compared both kinds of tile.
bool was_checked(const std::string& record) {
  std::error_code error;
  return !record.empty() && std::filesystem::exists(record, error);
}

void remember(const std::string& record) {
  std::error_code error;
  if (!record.empty()) {
    std::filesystem::create_directories(std::filesystem::path(record).parent_path(), error);
    std::ofstream(record).flush();
  }
}

std::string try_tensor_tiles(Backend& mps) {
  const TensorRecord record = tensor_record();
  if (!record.macos_suffices) {
    return "they need macOS 26.2";
  }
  const ProbeSettings settings = probe_settings();
  std::string problem = probe_tensor(mps, settings);
  if (problem.empty() && !was_checked(record.path)) {
    problem = try_apart(settings.limit, [&mps, type = settings.device_type] {
      return compare_kinds_of_tile(mps, type);
    });
    if (problem.empty()) {
      remember(record.path);
    }
  }
  if (!problem.empty() && problem != kNoTensorLanguage) {
    warn(problem);
  }
  return first_line(problem);
}

#else

std::string try_tensor_tiles(Backend&) { return "there is no mps"; }

#endif

}  // namespace

bool uses_tensor_tiles(Backend& backend) {
  if (!wanted() || !backend.is_gpu()) {
    return wanted();
  }
  Verdict& tried = verdict();
  const std::lock_guard lock(tried.mutex);
  if (!tried.problem) {
    tried.problem = try_tensor_tiles(backend);
  }
  return tried.problem->empty();
}

std::string tensor_tiles_problem(Backend& backend) {
  if (uses_tensor_tiles(backend)) {
    return "";
  }
  Verdict& tried = verdict();
  const std::lock_guard lock(tried.mutex);
  return wanted() ? *tried.problem : unwanted();
}

std::string tensor_tiles_problem(bool on_mps) {
#if defined(__APPLE__) || defined(TORCH_METAL_ATTN_FAKE_MPS)
  if (on_mps) {
    return *metal_attn_mps_problem() == '\0' ? tensor_tiles_problem(mps_backend())
                                             : "mps cannot be used";
  }
#endif
  (void)on_mps;
  return wanted() ? "" : unwanted();
}

bool expects_tensor_tiles() { return gpu().family >= kTensorFamily || setting() == Setting::kOn; }

void give_up_tensor_tiles(const std::string& why) {
  Verdict& tried = verdict();
  const std::lock_guard lock(tried.mutex);
  if (!tried.problem || tried.problem->empty()) {
    tried.problem = first_line(why);
    warn(without_prefix(why));
  }
}

}  // namespace metal_attn

const char* metal_attn_tensor_tiles_problem(int32_t on_mps) {
  static thread_local std::string problem;
  try {
    problem = metal_attn::tensor_tiles_problem(on_mps != 0);
  } catch (const std::exception& error) {
    problem = metal_attn::first_line(error.what());
  }
  return problem.c_str();
}
