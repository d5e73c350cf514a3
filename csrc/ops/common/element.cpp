#include "csrc/ops/common/element.h"

namespace metal_attn {

const char* element_name(Element element) {
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

int element_bytes(Element element) { return element == Element::kFloat ? 4 : 2; }

}  // namespace metal_attn
