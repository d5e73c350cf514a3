#include <bit>
#include <cstring>

#include "worker.h"

namespace metal_attn::simulator {
namespace {

// Bytes at a stack's end that are reserved for functions of the engine and libraries.
constexpr uint64_t kStackReserve = 32 * 1024;

// Types as clang's undefined behaviour sanitizer describes them.
struct Type {
  uint16_t kind;  // 0: integer, 1: floating-point
  uint16_t info;  // integers: 2 * log2(bits), plus 1 if signed; floating-point types: bits
  char name[1];   // in quotes
};
// A type's name without the quotes. If the type is an alias, the aliased type is left out.
struct Name {
  explicit Name(const Type& type) : Name(type.name) {}
  explicit Name(const char* quoted) : begin(quoted + 1) {
    const char* end = strchr(begin, '\'');
    length = end ? static_cast<int>(end - begin) : 0;
  }
  const char* begin;
  int length;
};
// The type of an array, and its name if it is a threadgroup variable, not a part of one. The
// sanitizer describes the type of variable x as `'__local __tg_x' (aka '__local float[3]')`.
struct Array {
  explicit Array(const Type& type) : name(type) {
    if (strstr(type.name, "__local")) fault = FAULT_THREADGROUP_OUT_OF_BOUNDS;
    if (strstr(type.name, "__constant") || strstr(type.name, "__global"))
      fault = FAULT_OUT_OF_BOUNDS;
    const char* prefix = strstr(type.name, "__tg_");
    const char* alias = strstr(type.name, "(aka '");
    if (!prefix || prefix >= name.begin + name.length || !alias) return;
    variable = prefix + strlen("__tg_");
    variable_length = static_cast<int>(name.begin + name.length - variable);
    name = Name(alias + strlen("(aka "));
    if (const int bytes = strlen("__local "); !strncmp(name.begin, "__local ", bytes))
      name.begin += bytes, name.length -= bytes;
  }
  Name name;
  SimulatorFaultKind fault = FAULT_PRIVATE_OUT_OF_BOUNDS;
  const char* variable = "";
  int variable_length = 0;
};
// The data of the sanitizer's calls. Some calls have only the first type.
struct Types {
  const char* file;
  uint32_t line, column;
  const Type *first, *second;
};

long long as_signed(const Type& type, unsigned long value) {
  unsigned unused = 64 - (1u << (type.info >> 1));
  return type.info & 1 ? static_cast<long long>(value << unused) >> unused
                       : static_cast<long long>(value);
}

double as_double(const Type& type, unsigned long value) {
  const auto bits = static_cast<uint32_t>(value);
  if (type.info == 32) return std::bit_cast<float>(bits);
  if (strstr(type.name, "bf")) return std::bit_cast<float>(bits << 16);
  // half: sign, 5 bits of exponent, 10 bits of fraction
  double fraction = static_cast<double>(value & 0x3FF) / 1024;
  int exponent = static_cast<int>(value >> 10 & 31);
  double magnitude = exponent == 31 ? (fraction == 0 ? __builtin_inf() : __builtin_nan(""))
                     : exponent     ? __builtin_ldexp(1 + fraction, exponent - 15)
                                    : __builtin_ldexp(fraction, -14);
  return value >> 15 & 1 ? -magnitude : magnitude;
}

}  // namespace

void engine_undefined(unsigned what, const void* about, unsigned long a, unsigned long b,
                      unsigned site) {
  Worker& worker = this_worker();
  const Fiber& fiber = worker.current();
  if (site == kNoSite) site = fiber.site;
  switch (what) {
    case MSL_INDEX: {
      auto& types = *static_cast<const Types*>(about);
      Array array(*types.first);
      worker.fail(array.fault, site, "index %lld of %s%.*s%s%.*s", as_signed(*types.second, a),
                  array.variable_length ? "threadgroup variable " : "", array.variable_length,
                  array.variable, array.variable_length ? ", a " : "", array.name.length,
                  array.name.begin);
    }
    case MSL_PRIVATE_ACCESS:
      worker.fail(FAULT_PRIVATE_OUT_OF_BOUNDS, site,
                  "access outside of a private variable: byte %lld of %llu",
                  static_cast<long long>(a), static_cast<unsigned long long>(b));
    case MSL_DIVISION: {
      auto& type = *static_cast<const Types*>(about)->first;
      worker.fail(FAULT_INTEGER_DIVISION, site, "%.*s %lld divided by %lld", Name(type).length,
                  Name(type).begin, as_signed(type, a), as_signed(type, b));
    }
    case MSL_DIVISION_OVERFLOW:
      worker.fail(FAULT_INTEGER_DIVISION, site,
                  "division by zero, or division of the smallest integer by -1");
    case MSL_CONVERSION: {
      auto& types = *static_cast<const Types*>(about);
      Name from(*types.first), to(*types.second);
      worker.fail(FAULT_FLOAT_TO_INTEGER, site, "%.*s %g converted to %.*s", from.length,
                  from.begin, as_double(*types.first, a), to.length, to.begin);
    }
    case MSL_SHIFT: {
      auto& types = *static_cast<const Types*>(about);
      worker.fail(FAULT_SHIFT, site, "shift of %.*s by %lld bits", Name(*types.first).length,
                  Name(*types.first).begin, as_signed(*types.second, b));
    }
    case MSL_VECTOR_SHIFT:
      worker.fail(FAULT_SHIFT, site, "shift of a vector of %lu-bit elements by %ld bits", a,
                  static_cast<long>(b));
    case MSL_LANE:
      worker.fail(FAULT_SIMD_LANE, site, "read of lane %lu; the last lane is %lu", a, b - 1);
    case MSL_INACTIVE_LANE:
      if (!(fiber.group->full >> a & 1)) return;
      worker.fail(FAULT_PARTIAL_SIMD, site,
                  "lane %u of SIMD group %u reads lane %lu, which is not active; the active lanes "
                  "are lanes %08lx",
                  fiber.lane, fiber.simdgroup, a, b);
    case MSL_CLAMP:
      worker.fail(FAULT_CLAMP, site, "clamp with a minimum above the maximum");
    case MSL_TENSOR_USE:
      worker.fail(FAULT_TENSOR, site, "%s", static_cast<const char*>(about));
    case MSL_UNINITIALISED:
      worker.fail(FAULT_UNINITIALISED, site,
                  about
                      ? "use of %s, which has not been written"
                      : "use of a part of a private variable, where the part has not been written "
                        "or the variable's scope has ended",
                  static_cast<const char*>(about));
    default:
      worker.fail(FAULT_MISSING_RETURN, site,
                  "a function that returns a value ends without a return");
  }
}

unsigned engine_private_access(const char* address, unsigned bytes, unsigned lanes,
                               const char* base, unsigned size, char* marks, unsigned flags,
                               unsigned stored_lanes, unsigned site) {
  constexpr unsigned kAll = ~0u;
  auto at = static_cast<unsigned long>(address - base);
  if (at > size || bytes > size - at) engine_undefined(MSL_PRIVATE_ACCESS, nullptr, at, size, site);
  if (!marks) return kAll;
  marks += at;
  // Most accesses write all their bytes, or read bytes that have been written.
  if (flags & MSL_WRITE) {
    unsigned all_lanes = lanes < 32 ? (1u << lanes) - 1 : kAll;
    if ((stored_lanes & all_lanes) == all_lanes) {
      memset(marks, 0, bytes);
      return kAll;
    }
  } else if (!memchr(marks, 1, bytes)) {
    return kAll;
  }
  unsigned defined = kAll;
  for (unsigned byte = 0; byte < bytes; ++byte) {
    unsigned lane = byte * lanes / bytes;
    if (flags & MSL_WRITE)
      marks[byte] = !(stored_lanes >> lane & 1);
    else if (marks[byte])
      defined &= ~(1u << lane);
  }
  return defined;
}

void engine_endless(unsigned site) {
  Worker& worker = this_worker();
  worker.fail(FAULT_ENDLESS_LOOP, site,
              "the threadgroup's loops have run %llu rounds, which is the limit (step_limit)",
              static_cast<unsigned long long>(worker.step_limit));
}

void engine_enter(unsigned site) {
  Worker& worker = this_worker();
  const Fiber& fiber = worker.current();
  const char* bottom = worker.stacks + fiber.stack * kStackStride;
  if (reinterpret_cast<const char*>(stack_pointer()) >= bottom + kStackReserve) return;
  worker.fail(
      FAULT_STACK_OVERFLOW, site,
      "calls need more than the %llu bytes of a thread's stack; check for endless recursion",
      static_cast<unsigned long long>(kStackStride - kStackReserve));
}

}  // namespace metal_attn::simulator
