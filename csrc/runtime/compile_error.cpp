#include "csrc/runtime/compile_error.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <vector>

namespace metal_attn {
namespace {

constexpr std::size_t kQuotedErrors = 3;
constexpr int kContextLines = 2;  // on either side

// What Metal calls a text that came from memory.
constexpr char kWholeText[] = "program_source";

struct Place {
  std::string file;
  int line;
};

// Of "file:12:3: error: ...", as clang and Metal write it.
std::optional<Place> error_place(const std::string& log_line) {
  const std::size_t error = log_line.find(": error:");
  if (error == std::string::npos) {
    return std::nullopt;
  }
  const std::size_t column = log_line.rfind(':', error - 1);
  const std::size_t line = column == std::string::npos ? column : log_line.rfind(':', column - 1);
  if (line == std::string::npos) {
    return std::nullopt;
  }
  const std::size_t file = log_line.rfind(' ', line);
  const std::size_t begin = file == std::string::npos ? 0 : file + 1;
  return Place{log_line.substr(begin, line - begin), std::atoi(log_line.c_str() + line + 1)};
}

// The number and the file of a #line directive, which names the line after it.
std::optional<Place> line_directive(const std::string& line) {
  int number = 0;
  char file[200];
  if (std::sscanf(line.c_str(), "#line %d \"%199[^\"]\"", &number, file) != 2) {
    return std::nullopt;
  }
  return Place{file, number};
}

std::string quote(const std::vector<std::string>& lines, const Place& wanted) {
  Place at{kWholeText, 1};
  for (std::size_t i = 0; i < lines.size(); ++i, ++at.line) {
    const bool found = (at.file == wanted.file && at.line == wanted.line) ||
                       (wanted.file == kWholeText && static_cast<int>(i) + 1 == wanted.line);
    if (found) {
      std::ostringstream quoted;
      quoted << "\n  " << at.file << ":";
      const int index = static_cast<int>(i);
      for (int near = index - kContextLines; near <= index + kContextLines; ++near) {
        if (near >= 0 && near < static_cast<int>(lines.size())) {
          quoted << "\n  " << (near == index ? "> " : "  ") << at.line + near - index << " | "
                 << lines[static_cast<std::size_t>(near)];
        }
      }
      return quoted.str();
    }
    if (const auto next = line_directive(lines[i])) {
      at = {next->file, next->line - 1};
    }
  }
  return "";
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

// FNV-1a: the name of a text, the same in every process.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 14695981039346656037u;
  for (const char letter : text) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211u;
  }
  return hash;
}

// Where the text has been written, or "" if nowhere: one file for a text, however often it fails.
std::string write_text(const char* family, const std::string& text) {
  const char* folder = std::getenv("TMPDIR");
  std::string begin = folder != nullptr && *folder != '\0' ? folder : "/tmp";
  begin += std::string("/metal_attn_") + family + "_";
  std::string unfinished = begin + "XXXXXX.metal";
  const int file = mkstemps(unfinished.data(), 6);
  if (file < 0) {
    return "";
  }
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
  if (text.starts_with(kPrefix)) {
    text.remove_prefix(kPrefix.size());
  }
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
  std::string message = "metal_attn: compiling " + describe(program) + " failed: " + log;
  const std::vector<std::string> lines = lines_of(text);
  std::size_t quoted = 0;
  for (const std::string& log_line : lines_of(log)) {
    const auto place = error_place(log_line);
    if (place && quoted < kQuotedErrors) {
      message += quote(lines, *place);
      ++quoted;
    }
  }
  const std::string path = write_text(program.family, text);
  message += path.empty() ? "\nThe shader's text, which could be written to no file:\n" + text
                          : "\nThe shader's text is in " + path;
  return message +
         "\nPlease report this with that text and what `python -m torch_metal_attn verify --full` "
         "writes.";
}

}  // namespace metal_attn
