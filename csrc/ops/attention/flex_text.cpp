#include "csrc/ops/attention/flex_text.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>

#include "csrc/ops/common/check.h"
#include "shaders/params.h"

namespace metal_attn {
namespace {

constexpr std::array<std::string_view, 12> kTypes{"bool",     "char", "uchar",   "short",
                                                  "ushort",   "int",  "int64_t", "uint",
                                                  "uint64_t", "half", "bfloat",  "float"};

// Everything that a value may be made of, besides types, tN, numbers and captured tensors. Those of
// precise:: have a table of their own.
constexpr std::array<std::string_view, 33> kWords{"score",
                                                  "batch",
                                                  "head",
                                                  "query",
                                                  "key",
                                                  "impossible",
                                                  "true",
                                                  "false",
                                                  "NAN",
                                                  "INFINITY",
                                                  "fabs",
                                                  "floor",
                                                  "ceil",
                                                  "trunc",
                                                  "rint",
                                                  "max",
                                                  "min",
                                                  "isnan",
                                                  "flex_index",
                                                  "flex_floor_divide",
                                                  "flex_truncating_divide",
                                                  "flex_remainder",
                                                  "flex_truncating_remainder",
                                                  "flex_int",
                                                  "flex_long",
                                                  "flex_sign",
                                                  "flex_max",
                                                  "flex_min",
                                                  "flex_log1p",
                                                  "flex_expm1",
                                                  "flex_erf",
                                                  "flex_left_shift",
                                                  "flex_right_shift"};

constexpr std::array<std::string_view, 20> kPrecise{
    "exp", "exp2", "log",  "log2", "log10", "tanh", "sin",  "cos",   "sqrt",  "rsqrt",
    "pow", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh"};

constexpr std::array<std::string_view, 23> kOperators{"==", "!=", "<=", ">=", "&&", "||", "+", "-",
                                                      "*",  "/",  "%",  "<",  ">",  "&",  "|", "^",
                                                      "!",  "~",  "?",  ":",  "(",  ")",  ","};

template <std::size_t N>
bool among(const std::array<std::string_view, N>& words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

bool is_word(unsigned char letter) { return std::isalnum(letter) != 0 || letter == '_'; }

// `word` is `prefix` and digits.
bool numbered(std::string_view word, std::string_view prefix) {
  constexpr std::size_t kMostDigits = 6;
  return word.size() > prefix.size() && word.size() <= prefix.size() + kMostDigits &&
         word.substr(0, prefix.size()) == prefix &&
         std::all_of(word.begin() + static_cast<std::ptrdiff_t>(prefix.size()), word.end(),
                     [](unsigned char letter) { return std::isdigit(letter) != 0; });
}

// One pass over the words of a text.
class Reader {
 public:
  Reader(ArgumentName name, const std::string& text, const std::vector<int64_t>& ranks)
      : name_(name), text_(text), ranks_(ranks) {
    advance();
  }

  void read() {
    while (word_ == "const") {
      advance();
      expect(among(kTypes, word_));
      advance();
      expect(numbered(word_, "t"));
      advance();
      skip("=");
      value(";");
      skip(";");
    }
    skip("return");
    value(";");
    skip(";");
    expect(word_.empty());
  }

 private:
  void refuse() const {
    check(false, name_, " has '", word_, "' at ", begin_,
          "; it must be a text that torch_metal_attn.flex made");
  }
  void expect(bool condition) const {
    if (!condition) {
      refuse();
    }
  }

  // The next word, number or operator.
  void advance() {
    begin_ = end_;
    while (begin_ < text_.size() && text_[begin_] == ' ') {
      ++begin_;
    }
    end_ = begin_;
    const std::string_view rest = std::string_view(text_).substr(begin_);
    if (rest.empty()) {
      word_ = {};
      return;
    }
    std::size_t length = 1;
    if (std::isdigit(static_cast<unsigned char>(rest[0])) != 0) {
      // 1, 1L, 1.5f, 1e+20f
      const auto in_number = [&](std::size_t i) {
        const bool sign = (rest[i] == '+' || rest[i] == '-') && rest[i - 1] == 'e';
        return is_word(static_cast<unsigned char>(rest[i])) || rest[i] == '.' || sign;
      };
      while (length < rest.size() && in_number(length)) {
        ++length;
      }
    } else if (is_word(static_cast<unsigned char>(rest[0]))) {
      while (length < rest.size() && is_word(static_cast<unsigned char>(rest[length]))) {
        ++length;
      }
    } else if (rest.size() > 1 &&
               (among(kOperators, rest.substr(0, 2)) || rest.substr(0, 2) == "::")) {
      length = 2;
    }
    word_ = rest.substr(0, length);
    end_ = begin_ + length;
  }

  void skip(std::string_view word) {
    expect(word_ == word);
    advance();
  }

  // Everything up to `end`, which is outside of brackets.
  void value(std::string_view end) {
    int open = 0;
    for (bool first = true; open > 0 || word_ != end; first = false) {
      expect(!word_.empty() && !(first && word_ == ")"));
      open += word_ == "(" ? 1 : word_ == ")" ? -1 : 0;
      expect(open >= 0);
      part();
    }
  }

  void part() {
    if (word_ == "inputs") {
      captured();
    } else if (word_ == "params") {
      size();
    } else if (word_ == "precise") {
      advance();
      skip("::");
      expect(among(kPrecise, word_));
      advance();
    } else {
      expect(among(kOperators, word_) || among(kWords, word_) || among(kTypes, word_) ||
             numbered(word_, "t") || number());
      advance();
    }
  }

  bool number() const {
    return std::isdigit(static_cast<unsigned char>(word_[0])) != 0 &&
           std::all_of(word_.begin(), word_.end(), [](unsigned char letter) {
             return std::isdigit(letter) != 0 ||
                    std::string_view(".e+-fL").find(letter) != std::string_view::npos;
           });
  }

  // [i], of a dimension of the captured tensors; returns i.
  int64_t dimension() {
    skip("[");
    expect(numbered(word_, ""));
    const int64_t i = std::stoll(std::string(word_));
    expect(i < FLEX_DIMENSIONS_MAX);
    advance();
    skip("]");
    return i;
  }

  // params.capture_sizes[i]
  int64_t size() {
    skip("params");
    skip(".");
    skip("capture_sizes");
    return dimension();
  }

  // inputs.capture_N[flex_index(..., params.capture_sizes[i], impossible) *
  // params.capture_strides[i] + ...], for each of its dimensions.
  void captured() {
    skip("inputs");
    skip(".");
    constexpr std::string_view kName = "capture_";
    expect(numbered(word_, kName));
    const std::size_t number = std::stoull(std::string(word_.substr(kName.size())));
    expect(number < ranks_.size());
    int64_t first = 0;
    for (std::size_t i = 0; i < number; ++i) {
      first += ranks_[i];
    }
    advance();
    skip("[");
    if (ranks_[number] == 0) {
      skip("0");
    }
    for (int64_t dim = 0; dim < ranks_[number]; ++dim) {
      if (dim > 0) {
        skip("+");
      }
      skip("flex_index");
      skip("(");
      value(",");
      skip(",");
      expect(size() == first + dim);
      skip(",");
      skip("impossible");
      skip(")");
      skip("*");
      skip("params");
      skip(".");
      skip("capture_strides");
      expect(dimension() == first + dim);
    }
    skip("]");
  }

  ArgumentName name_;
  const std::string& text_;
  const std::vector<int64_t>& ranks_;
  std::string_view word_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace

void check_flex_text(ArgumentName name, const std::string& text,
                     const std::vector<int64_t>& ranks) {
  Reader(name, text, ranks).read();
}

}  // namespace metal_attn
