// The element types that kernels compute in and store.
#pragma once

namespace metal_attn {

enum class Element { kFloat, kHalf, kBfloat };

int element_bytes(Element element);
const char* element_name(Element element);  // Metal's: float, half, bfloat

}  // namespace metal_attn
