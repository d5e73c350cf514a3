// The element types that kernels compute in and store.
#pragma once

namespace metal_attn {

enum class Element { kFloat, kHalf, kBfloat };

constexpr int element_bytes(Element element) { return element == Element::kFloat ? 4 : 2; }

// Metal's name.
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
