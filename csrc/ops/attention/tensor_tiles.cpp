#include "csrc/ops/attention/tensor_tiles.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <system_error>

#include "csrc/ops/common/check.h"
#include "csrc/ops/common/recorder.h"
#include "csrc/runtime/callbacks.h"
#include "csrc/runtime/probe.h"
#include "csrc/runtime/trial_note.h"
#include "csrc/tiles/shared.h"

namespace metal_attn {
namespace {

constexpr char kSetting[] = "TORCH_METAL_ATTN_TENSOR_TILES";

enum class Setting { kOff, kAuto, kOn };

Setting setting() {
  const std::string_view value = environment(kSetting, "auto");
  check(value == "off" || value == "auto" || value == "on", kSetting, " is '", value,
        "'; it must be off, auto or on");
  return value == "off" ? Setting::kOff : value == "on" ? Setting::kOn : Setting::kAuto;
}

// True if the setting and the GPU allow tensor tiles. Comparisons may still find a problem.
bool allowed() {
  const Setting chosen = setting();
  return chosen == Setting::kOn || (chosen == Setting::kAuto && gpu().family >= kTensorFamily);
}

bool allowed(bool float32) { return (!float32 || tf32_allowed()) && allowed(); }

std::string why_not_allowed() {
  if (setting() == Setting::kOff) { return std::string(kSetting) + " is off"; }
  if (allowed()) { return "tensor operations reduce float32 to 11 bits, and " + tf32_reason(); }
  const std::string name = gpu_name();
  return "no Apple GPU with matrix units (M5 or later) was found" +
         (name.empty() ? "" : ": this is an " + name);
}

// For an unchecked tensor: scalar_type() throws for some dtypes.
bool is_float32(const Tensor& q) {
  int32_t dtype = -1;
  return q.defined() && aoti_torch_get_dtype(q.get(), &dtype) == 0 &&
         dtype == aoti_torch_dtype_float32();
}

struct Verdict {
  std::mutex mutex;
  std::optional<std::string> problem;  // nullopt: not tried yet
};

// Never destroyed: threads may still launch at exit.
Verdict& verdict(TileComparison comparison) {
  static auto* const verdicts = new std::array<Verdict, 4>;
  return (*verdicts)[(comparison.pass == Pass::kBackward ? 1 : 0) + (comparison.float32 ? 2 : 0)];
}

void print_reason(const std::string& user, const std::string& why) {
  std::fprintf(stderr, "torch_metal_attn: %s uses 8x8 tiles, not tensor tiles: %s\n", user.c_str(),
               why.c_str());
}

void warn(const std::string& user, const std::string& why) {
  print_reason(user, why);
  std::fprintf(stderr,
               "torch_metal_attn: please report this with the output of `python -m "
               "torch_metal_attn verify --full`; %s=off silences this warning\n",
               kSetting);
}

// The result of a comparison, which runs at most once per process.
std::string problem_of(Backend& backend, TileComparison comparison);

#if defined(__APPLE__) || defined(TORCH_METAL_ATTN_FAKE_MPS)

std::string name(TileComparison comparison) {
  const std::string pass =
      comparison.pass == Pass::kBackward ? "attention's backward" : "attention";
  return pass + (comparison.float32 ? " in float32" : "");
}

// The path of an empty file, which exists if an earlier process compared both kinds of tile. "" if
// there is no folder for it.
std::string record_of(TileComparison comparison) {
  const std::string path = tensor_record().path;
  return path.empty() ? ""
                      : path + (comparison.float32 ? "_float32" : "") +
                            (comparison.pass == Pass::kBackward ? "_backward" : "");
}

// A multiple of the probe's limit, because up to 18 larger kernels are compiled and run.
constexpr int kCompareLimits = 3;

// Prints why the user has to wait. Mentions `verify` once.
void announce(TileComparison comparison) {
  const bool first = comparison.pass == Pass::kForward && !comparison.float32;
  std::fprintf(stderr,
               "torch_metal_attn: %s now compiles several kernels, once for each version of macOS, "
               "torch and this package: it compares tensor tiles with 8x8 tiles in a few small "
               "problems%s\n",
               name(comparison).c_str(),
               first ? "; `python -m torch_metal_attn verify --full` compares many more" : "");
}

// "" if both kinds of tile agree, in this process or in an earlier one.
std::string compare_once(Backend& mps, TileComparison comparison,
                         std::shared_ptr<const void> note) {
  const std::string record = record_of(comparison);
  std::error_code error;
  if (!record.empty() && std::filesystem::exists(record, error)) { return ""; }
  announce(comparison);
  ProbeSettings settings = probe_settings();  // tests change the settings between two trials
  settings.limit *= kCompareLimits;
  settings.note = std::move(note);
  const std::string problem =
      try_in_thread(settings, "the comparison of both kinds of tile",
                    [&mps, comparison, type = settings.device_type] {
                      return compare_tiles(mps, type, comparison.pass, comparison.float32);
                    });
  if (problem.empty() && !record.empty()) {
    std::filesystem::create_directories(std::filesystem::path(record).parent_path(), error);
    std::ofstream(record).flush();
  }
  return problem;
}

std::optional<TileComparison> prerequisite(TileComparison comparison) {
  if (comparison.pass == Pass::kBackward) {
    return TileComparison{Pass::kForward, comparison.float32};
  }
  return comparison.float32 ? std::optional(TileComparison{Pass::kForward, false}) : std::nullopt;
}

std::string try_tensor_tiles(Backend& mps, TileComparison comparison) {
  if (const std::optional<TileComparison> before = prerequisite(comparison)) {
    const std::string problem = problem_of(mps, *before);
    if (!problem.empty()) { return problem; }  // the warning was printed before
  } else if (!tensor_record().macos_suffices) {
    return "tensor tiles need macOS 26.2 or later";
  }
  ProbeSettings settings = probe_settings();
  const std::string record = record_of(comparison);
  const TrialStart start =
      begin_trial(record.empty() ? "" : record + "_begun", (1 + kCompareLimits) * settings.limit,
                  setting() == Setting::kOn);
  if (!start.problem.empty()) {
    const std::string problem = start.problem + "; " + kSetting +
                                "=on tries tensor tiles again, and =off silences this line";
    print_reason(name(comparison), problem);
    return problem;
  }
  settings.note = start.note;
  std::string problem =
      comparison.pass == Pass::kForward ? probe_tensor(mps, settings, comparison.float32) : "";
  if (problem.empty()) { problem = compare_once(mps, comparison, start.note); }
  if (!problem.empty() && problem != kNoTensorLanguage) { warn(name(comparison), problem); }
  return first_line(problem);
}

#else

std::string try_tensor_tiles(Backend&, TileComparison) { return "there is no mps"; }

#endif

std::string problem_of(Backend& backend, TileComparison comparison) {
  Verdict& known = verdict(comparison);
  const std::lock_guard lock(known.mutex);
  if (!known.problem) { known.problem = try_tensor_tiles(backend, comparison); }
  return *known.problem;
}

std::string problem_on(bool on_mps, TileComparison comparison) {
#if defined(__APPLE__) || defined(TORCH_METAL_ATTN_FAKE_MPS)
  if (on_mps) {
    if (*metal_attn_mps_problem() != '\0') { return "mps cannot be used"; }
    return allowed(comparison.float32) ? problem_of(mps_backend(), comparison) : why_not_allowed();
  }
#endif
  (void)on_mps;
  return allowed(comparison.float32) ? "" : why_not_allowed();
}

}  // namespace

bool uses_tensor_tiles(const Tensor& q, Backend& backend, Pass pass) {
  if (backend.records()) { return q.defined() && tensor_tiles_problem(q, pass).empty(); }
  const bool float32 = is_float32(q);
  // If q is undefined, the op's checks refuse it later.
  return q.defined() && allowed(float32) &&
         (!backend.is_gpu() || problem_of(backend, {pass, float32}).empty());
}

std::string tensor_tiles_problem(const Tensor& q, Pass pass) {
  const bool on_mps =
      compiler_of_recorded() != nullptr || (q.defined() && !q.is_cpu() && !is_meta(q));
  return problem_on(on_mps, {pass, is_float32(q)});
}

std::string missing_tensor_tiles(const char* why_not, const std::string& problem) {
  const bool expected = gpu().family >= kTensorFamily || setting() == Setting::kOn;
  if (!expected || (why_not == nullptr && problem.empty())) { return ""; }
  return "no tensor tiles, as " + (why_not == nullptr ? problem : why_not);
}

const char* no_tensor_tiles(const FlashFwdProblem& problem) {
  constexpr int kTensorRows = 16;  // of a SIMD group
  const FlashFwdFeatures& f = problem.features;
  return f.q_block() % kTensorRows == 0 && f.kv_block() % kTensorSpan == 0
             ? nullptr
             : "a tensor tile of 16 queries and 32 keys would span two blocks of the BlockMask";
}

const char* no_tensor_gradients(const FlashFwdProblem& problem) {
  const FlashFwdFeatures& features = problem.features;
  if (features.flex) {
    return "gradients through score_mod, mask_mod and block lists have 8x8 tiles only";
  }
  // The kernels of these gradients do not round products, and need the delta of the same products.
  if (problem.element == Element::kFloat && (features.bias || features.alibi)) {
    return "float32's gradients with attn_bias or alibi_slopes have 8x8 tiles only";
  }
  return no_tensor_tiles(problem);
}

void warn_tensor_tiles_refused(const std::string& user, const std::string& why) {
  static auto* const mutex = new std::mutex;
  static auto* const printed = new std::set<std::string>;
  const std::lock_guard lock(*mutex);
  if (printed->insert(why).second) { warn(user, why); }
}

}  // namespace metal_attn

const char* metal_attn_tensor_tiles_problem(int32_t on_mps, int32_t backward, int32_t float32) {
  using metal_attn::Pass;
  static thread_local std::string problem;
  try {
    problem = metal_attn::problem_on(
        on_mps != 0, {backward != 0 ? Pass::kBackward : Pass::kForward, float32 != 0});
  } catch (const std::exception& error) { problem = metal_attn::first_line(error.what()); }
  return problem.c_str();
}
