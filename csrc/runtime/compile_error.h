// Messages for a shader that Metal does not compile, or compiles slowly.
#pragma once

#include <string_view>

#include "csrc/runtime/launch.h"

namespace metal_attn {

// Without the prefix of our errors, for texts that become part of one.
std::string without_prefix(std::string_view text);
std::string first_line(std::string_view text);  // of what is left

// "flash_fwd ELEMENT=half HEAD_DIM_QK=64 ..."
std::string describe(const Program& program);

// Names the specialisation, quotes `log`, in which Metal quotes the lines of its errors, and says
// in which file the whole text has been written.
std::string compile_error(const Program& program, const std::string& text, const std::string& log);

// Says on stderr, a few times in a process, that the user waited for a kernel to be compiled.
void say_if_slow(const char* kernel, int64_t milliseconds);

}  // namespace metal_attn
