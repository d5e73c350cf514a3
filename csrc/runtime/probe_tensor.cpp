// Linked together with csrc/runtime/mps.cpp.
#if defined(__APPLE__) || defined(TORCH_METAL_ATTN_FAKE_MPS)

#include "csrc/runtime/probe.h"

#include "csrc/runtime/compile_error.h"
#include "shaders/params/probe.h"

namespace metal_attn {
namespace {

using Values = std::vector<float>;

struct Operand {
  const char* name;
  int slots;
};

// In the order in which the kernel writes them.
constexpr std::array<Operand, 3> kOperands{
    {{"left operand", 8}, {"right operand", 16}, {"result", 16}}};

float at(const Values& values, int index) { return values[static_cast<std::size_t>(index)]; }

// The tables of tensor_tile.h: rows r + 8 i, columns 4 u + e, or 16 h + 4 u + e in the right
// operand and the result.
int coordinates(int lane, int slot) {
  const int row = (lane / 4 & 4) + lane / 2 % 4 + slot / 4 % 2 * 8;
  const int column = ((lane / 4 & 2) + lane % 2) * 4 + slot % 4 + slot / 8 * 16;
  return PROBE_TENSOR_ROW * row + column;
}

std::string capacity_problem(const Values& got) {
  for (std::size_t i = 0; i < kOperands.size(); ++i) {
    const float capacity = at(got, PROBE_TENSOR_CAPACITIES + static_cast<int>(i));
    if (capacity != static_cast<float>(kOperands[i].slots)) {
      return text_of("a lane has ", capacity, " slots of the ", kOperands[i].name,
                     " of a tensor operation, where ", kOperands[i].slots, " were expected");
    }
  }
  return "";
}

std::string layout_problem(const Values& got) {
  for (int lane = 0; lane < PROBE_LANES; ++lane) {
    int first = PROBE_TENSOR_COORDINATES + lane * PROBE_TENSOR_LANE_SLOTS;
    for (const Operand& operand : kOperands) {
      for (int slot = 0; slot < operand.slots; ++slot) {
        const int actual = static_cast<int>(at(got, first + slot));
        const int expected = coordinates(lane, slot);
        if (actual != expected) {
          return text_of("in the ", operand.name, " of a tensor operation, slot ", slot,
                         " of lane ", lane, " is at row ", actual / PROBE_TENSOR_ROW, ", column ",
                         actual % PROBE_TENSOR_ROW, ", where row ", expected / PROBE_TENSOR_ROW,
                         ", column ", expected % PROBE_TENSOR_ROW, " was expected");
        }
      }
      first += operand.slots;
    }
  }
  return "";
}

struct Product {
  bool wide_left;
  bool wide_right;
};

// In the order in which the kernel writes them.
std::vector<Product> products(bool float32) {
  if (float32) { return {{false, true}, {true, false}}; }
  return {{false, false}, {false, false}, {true, false}, {true, false}};
}

std::string product_problem(const Values& got, bool float32) {
  int index = PROBE_TENSOR_PRODUCTS;
  for (const Product& product : products(float32)) {
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 32; ++column, ++index) {
        int expected = probe_tensor_before(row, column);
        for (int k = 0; k < 16; ++k) {
          expected += probe_tensor_left(row, k, product.wide_left) *
                      probe_tensor_right(k, column, product.wide_right);
        }
        if (at(got, index) != static_cast<float>(expected)) {
          return text_of("a tensor operation gave ", at(got, index), " instead of ", expected);
        }
      }
    }
  }
  return "";
}

std::string comparison(const Values& got, bool float32) {
  if (at(got, PROBE_TENSOR_LANGUAGE) == 0.0f) { return kNoTensorLanguage; }
  for (const auto& problem : {capacity_problem, layout_problem}) {
    const std::string why = problem(got);
    if (!why.empty()) { return why; }
  }
  return product_problem(got, float32);
}

}  // namespace

std::string probe_tensor(Backend& mps, const ProbeSettings& settings, bool float32) {
  Program program{"probe_tensor", {}};
  program.defines.push_back({"FLOAT32", float32});
  // -1 is no coordinate, so values that the kernel does not write are reported.
  return probe_values(mps, settings, program, Values(PROBE_TENSOR_VALUES, -1.0f),
                      [float32](const Values& got) { return comparison(got, float32); });
}

}  // namespace metal_attn

#endif
