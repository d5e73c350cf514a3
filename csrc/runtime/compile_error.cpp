#include "csrc/runtime/compile_error.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "csrc/runtime/backend.h"

namespace metal_attn {
namespace {

// FNV-1a, which is the same in every process.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const char letter : text) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211u;
  }
  return hash;
}

// Writes the text to a file whose name depends on the text. Returns its path, or "".
std::string write_text(const char* family, const std::string& text) {
  const char* folder = std::getenv("TMPDIR");
  std::string begin = folder != nullptr && *folder != '\0' ? folder : "/tmp";
  begin += std::string("/metal_attn_") + family + "_";
  std::string unfinished = begin + "XXXXXX.metal";
  const int file = mkstemps(unfinished.data(), 6);
  if (file < 0) { return ""; }
  const bool whole = write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (close(file) != 0 || !whole) {
    unlink(unfinished.c_str());
    return "";
  }
  std::ostringstream path;
  path << begin << std::hex << hash_of(text) << ".metal";
  return std::rename(unfinished.c_str(), path.str().c_str()) == 0 ? path.str() : unfinished;
}

}  // namespace

std::string without_prefix(std::string_view text) {
  constexpr std::string_view kPrefix = "metal_attn: ";
  if (text.starts_with(kPrefix)) { text.remove_prefix(kPrefix.size()); }
  return std::string(text);
}

std::string first_line(std::string_view text) {
  return without_prefix(text.substr(0, text.find('\n')));
}

std::string describe(const Program& program) {
  std::string name = program.family;
  for (const Define& define : program.defines) {
    name += std::string(" ") + define.name + "=" + define.value();
  }
  return name;
}

std::string compile_error(const Program& program, const std::string& text, const std::string& log) {
  const std::string path = write_text(program.family, text);
  return "compiling " + describe(program) + " failed: " + log +
         (path.empty() ? "\nThe shader's text could not be written to a file:\n" + text
                       : "\nThe shader's text is in " + path);
}

void warn_if_slow(const char* kernel, int64_t milliseconds) {
  constexpr int64_t kSlow = 2000;
  constexpr int kMostLines = 5;
  static std::atomic<int> lines{0};
  if (milliseconds <= kSlow) { return; }
  const int line = lines.fetch_add(1) + 1;
  if (line <= kMostLines) {
    std::fprintf(stderr,
                 "torch_metal_attn: compiling %s took %.1f s, once in this process; "
                 "torch_metal_attn.warm_up compiles kernels before they are needed%s\n",
                 kernel, double(milliseconds) / 1000,
                 line == kMostLines ? " (later slow compilations are not reported)" : "");
  }
}

Backend*& compiler_of_recorded() {
  thread_local Backend* compiler = nullptr;
  return compiler;
}

CompileError::CompileError(const std::string& why)
    : std::runtime_error("metal_attn: " + why +
                         "\nPlease report this error with the files that it names and the output "
                         "of `python -m torch_metal_attn verify --full`."),
      why(why) {}

}  // namespace metal_attn
