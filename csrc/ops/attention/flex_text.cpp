#include "csrc/ops/attention/flex.h"

#include <cctype>
#include <numeric>
#include <utility>

namespace metal_attn {
namespace {

// The words that a value may contain, in addition to tN, numbers and captured tensors.
constexpr std::string_view kTypes =
    " bool char uchar short ushort int int64_t uint uint64_t half bfloat float ";
constexpr std::string_view kWords =
    " score batch head query key impossible true false NAN INFINITY fabs floor ceil trunc rint max "
    "min isnan flex_index flex_floor_divide flex_truncating_divide flex_remainder "
    "flex_truncating_remainder flex_int flex_long flex_sign flex_max flex_min flex_log1p "
    "flex_expm1 flex_erf flex_left_shift flex_right_shift ";
constexpr std::string_view kPreciseFunctions =
    " exp exp2 log log2 log10 tanh sin cos sqrt rsqrt pow asin acos atan atan2 sinh cosh asinh "
    "acosh atanh ";
constexpr std::array<std::string_view, 18> kOperators{
    "==", "!=", "<=", ">=", "&&", "||", "+", "-", "/", "<", ">", "|", "^", "!", "~", "?", ":", ","};

bool contains_word(std::string_view words, std::string_view word) {
  return words.find(" " + std::string(word) + " ") != std::string_view::npos;
}

bool is_digit(char letter) { return std::isdigit(static_cast<unsigned char>(letter)) != 0; }

bool is_number(std::string_view word) {
  return !word.empty() && std::all_of(word.begin(), word.end(), is_digit);
}

bool is_word_letter(char letter) {
  return std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '_';
}

// Parses a text. A compiler may still refuse an accepted text, but the text accesses only the
// tensors of the call. The text has no pointers or references, because `*` and `&` must follow a
// value and types must precede a parenthesis. Only `captured` accepts brackets.
class Reader {
 public:
  Reader(ArgumentName name, const std::string& text, const std::vector<int64_t>& ranks)
      : name_(name), text_(text), rest_(text), ranks_(ranks) {}

  void read() {
    while (skip("const ")) {
      word([](const std::string& word) { return contains_word(kTypes, word); });
      need(skip(" t"));
      index(kMostNames);
      need(skip(" = "));
      value("; ");
    }
    need(skip("return "));
    value(";");
    need(rest_.empty());
  }

 private:
  static constexpr int64_t kMostNames = 1000000;  // N of a name tN is below this number

  void need(bool condition) const {
    constexpr std::size_t kShown = 40;
    check(condition, name_, " has '", rest_.substr(0, kShown), "' at position ",
          text_.size() - rest_.size(), "; it must be a text that torch_metal_attn.flex generated");
  }

  bool skip(std::string_view exact) {
    const bool matches = rest_.starts_with(exact);
    rest_.remove_prefix(matches ? exact.size() : 0);
    return matches;
  }

  template <class Belongs>
  std::string_view take(const Belongs& belongs) {
    const auto end = std::find_if_not(rest_.begin(), rest_.end(), belongs);
    const std::string_view taken = rest_.substr(0, static_cast<std::size_t>(end - rest_.begin()));
    rest_.remove_prefix(taken.size());
    return taken;
  }

  template <class Allowed>
  std::string word(const Allowed& allowed) {
    const std::string_view rest = rest_;
    const std::string taken(take(is_word_letter));
    const bool good = allowed(taken);
    rest_ = good ? rest_ : rest;
    need(good);
    return taken;
  }

  int64_t index(int64_t limit) {
    constexpr std::size_t kMostDigits = 9;
    return std::stoll(word([limit](const std::string& digits) {
      return is_number(digits) && digits.size() <= kMostDigits && std::stoll(digits) < limit;
    }));
  }

  // Parses a value, which ends at an `end` outside of all parentheses.
  void value(std::string_view end) {
    int open = 0;
    bool after_value = false;
    while (open > 0 || !skip(end)) {
      if (skip(" ")) { continue; }
      const bool opens = skip("(");
      const bool closes = open > 0 && !opens && skip(")");
      open += opens ? 1 : closes ? -1 : 0;
      const bool is_operand = !opens && !closes && !rest_.empty() && is_word_letter(rest_[0]);
      if (is_operand) {
        operand();
      } else if (!opens && !closes) {
        need(std::any_of(kOperators.begin(), kOperators.end(),
                         [this](std::string_view sign) { return skip(sign); }) ||
             (after_value && (skip("*") || skip("&"))));
      }
      after_value = closes || is_operand;
    }
  }

  void operand() {
    if (skip("inputs.capture_")) {
      captured();
    } else if (skip("params.capture_sizes[")) {
      index(FLEX_DIMENSIONS_MAX);
      need(skip("]"));
    } else if (skip("precise::")) {
      word([](const std::string& word) { return contains_word(kPreciseFunctions, word); });
    } else if (is_digit(rest_[0])) {  // 1, 1L, 1.5f, 1e+20f
      char previous = 0;
      take([&previous](char letter) {
        const bool sign = (letter == '+' || letter == '-') && previous == 'e';
        previous = letter;
        return sign || is_digit(letter) || letter == '.' || letter == 'e' || letter == 'f' ||
               letter == 'L';
      });
    } else {
      word([this](const std::string& word) {
        return (word[0] == 't' && is_number(word.substr(1))) || contains_word(kWords, word) ||
               (contains_word(kTypes, word) && rest_.starts_with('('));
      });
    }
  }

  // Parses N[flex_index(..., params.capture_sizes[i], impossible) * params.capture_strides[i] +
  // ...] with a term for each dimension i of tensor N.
  void captured() {
    need(!std::exchange(within_index_, true));
    const auto rank = ranks_.begin() + index(static_cast<int64_t>(ranks_.size()));
    const int64_t first = std::accumulate(ranks_.begin(), rank, int64_t{0});
    need(skip(*rank > 0 ? "[" : "[0"));
    for (int64_t i = first; i < first + *rank; ++i) {
      const std::string dimension = "[" + std::to_string(i) + "]";
      need((i == first || skip(" + ")) && skip("flex_index("));
      value(", params.capture_sizes" + dimension + ", impossible)");
      need(skip(" * params.capture_strides" + dimension));
    }
    need(skip("]"));
    within_index_ = false;
  }

  const ArgumentName name_;
  const std::string& text_;
  std::string_view rest_;  // not parsed yet
  const std::vector<int64_t>& ranks_;
  bool within_index_ = false;
};

}  // namespace

void check_flex_text(ArgumentName name, const std::string& text,
                     const std::vector<int64_t>& ranks) {
  Reader(name, text, ranks).read();
}

}  // namespace metal_attn
