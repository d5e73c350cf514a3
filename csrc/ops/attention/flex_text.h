// The texts of flex attention, which a compiler is given: only what torch_metal_attn/flex writes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/ops/common/check.h"

namespace metal_attn {

// Throws std::invalid_argument unless `text` is the body of a function in shaders/flex.h:
// statements "const TYPE tN = ...;" and "return ...;" of words in a table, numbers and operators,
// which read a captured tensor at flex_index of each of its dimensions only. ranks: of the captured
// tensors.
void check_flex_text(ArgumentName name, const std::string& text, const std::vector<int64_t>& ranks);

}  // namespace metal_attn
