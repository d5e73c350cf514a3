// The element types in which kernels compute and store.
#pragma once

namespace metal_attn {

enum class Element { kFloat, kHalf, kBfloat };

constexpr int element_bytes(Element element) { return element == Element::kFloat ? 4 : 2; }

// The name in Metal.
constexpr const char* element_name(Element element) {
  switch (element) {
    case Element::kFloat:
      return "float";
    case Element::kHalf:
      return "half";
    case Element::kBfloat:
      return "bfloat";
  }
  return "";
}

}  // namespace metal_attn
