// The backend of `explain` and of fake kernels. It records launches, and tensors that ops allocate
// have no data.
#pragma once

#include <vector>

#include "csrc/runtime/backend.h"

namespace metal_attn {

// A text that an op returns: eight bytes per int, padded with spaces, because torch (2.13) leaks
// each string that an op returns. torch_metal_attn/runtime/extension.py reads it.
using PackedText = std::vector<int64_t>;

inline PackedText packed_text(const std::string& text) {
  constexpr int64_t kSpaces = 0x2020202020202020;
  PackedText words((text.size() + sizeof(int64_t) - 1) / sizeof(int64_t), kSpaces);
  std::memcpy(words.data(), text.data(), text.size());
  return words;
}

// Names and strings must not contain quotes, backslashes or control characters.
class JsonObject {
 public:
  JsonObject& add(const std::string& name, const std::string& value) {
    return field(name, quoted(value));
  }
  JsonObject& add(const std::string& name, const char* value) { return field(name, quoted(value)); }
  JsonObject& add(const std::string& name, int64_t value) {
    return field(name, std::to_string(value));
  }
  JsonObject& add(const std::string& name, const std::array<uint32_t, 3>& v) {
    return field(name, "[" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " +
                           std::to_string(v[2]) + "]");
  }
  JsonObject& add(const std::string& name, const Defines& defines) {
    JsonObject object;
    for (const Define& define : defines) { object.add(define.name, define.value()); }
    return field(name, object.text());
  }

  JsonObject& add(const std::string& name, const JsonObject& value) {
    return field(name, value.text());
  }

  JsonObject& add(const std::string& name, const std::vector<std::string>& values) {
    std::string list;
    for (const std::string& value : values) { list += (list.empty() ? "" : ", ") + quoted(value); }
    return field(name, "[" + list + "]");
  }

  // Appends the fields of another object.
  JsonObject& append(const JsonObject& other) {
    fields_ += (fields_.empty() || other.fields_.empty() ? "" : ", ") + other.fields_;
    return *this;
  }

  std::string text() const { return "{" + fields_ + "}"; }

 private:
  static std::string quoted(const std::string& text) { return '"' + text + '"'; }

  JsonObject& field(const std::string& name, const std::string& value) {
    fields_ += (fields_.empty() ? "" : ", ") + quoted(name) + ": " + value;
    return *this;
  }

  std::string fields_;
};

// While a Recorder exists, tensors that ops allocate in its thread are on meta.
class Recorder final : public Backend {
 public:
  Recorder();
  ~Recorder() override;
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  void run(const Launch& launch) override;
  bool records() const override { return true; }

  // Sets the note of the next launch.
  void note(const JsonObject& fields) { note_ = fields; }

  PackedText packed() const { return packed_text("[" + launches_ + "]"); }

 private:
  std::string launches_;
  JsonObject note_;
  const bool was_recording_;
};

// True if a Recorder exists in this thread.
bool is_recording();

// If the backend records, adds the fields of make(), a JsonObject, to the next launch.
template <class Make>
void note(Backend& backend, const Make& make) {
  if (backend.records()) { static_cast<Recorder&>(backend).note(make()); }
}

}  // namespace metal_attn
