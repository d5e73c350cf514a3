// Functions that make texts, and messages about shaders that do not compile or compile slowly.
#pragma once

#include <sstream>
#include <string_view>

#include "csrc/runtime/launch.h"

namespace metal_attn {

template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Remove the prefix "metal_attn: ", for texts that become part of another error.
std::string without_prefix(std::string_view text);
std::string first_line(std::string_view text);

// "flash_fwd ELEMENT=half HEAD_DIM_QK=64 ..."
std::string describe(const Program& program);

// Writes the text to a file. Returns a message with the specialisation, Metal's log and the file.
std::string compile_error(const Program& program, const std::string& text, const std::string& log);

// Prints on stderr that the user waited for a compilation, a few times per process.
void warn_if_slow(const char* kernel, int64_t milliseconds);

}  // namespace metal_attn
