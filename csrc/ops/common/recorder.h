// What `explain` and the fake kernels run ops on: launches are kept instead of run, and what ops
// allocate has no data.
#pragma once

#include <string>

#include "csrc/ops/common/json.h"
#include "csrc/runtime/backend.h"

namespace metal_attn {

// While one lives in this thread, tensors that ops make are on meta.
class Recorder final : public Backend {
 public:
  Recorder();
  ~Recorder() override;
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  void run(const Launch& launch) override;
  bool records() const override { return true; }

  // What is told of the next launch beside it.
  void note(const JsonObject& more) { note_ = more; }

  // The launches as a list.
  PackedText packed() const { return packed_text("[" + launches_ + "]"); }

 private:
  std::string launches_;
  JsonObject note_;
  const bool outer_;  // whether another one lived before
};

// Whether tensors that ops make in this thread have no data.
bool is_recording();

// Adds what `tell` returns, a JsonObject, to the next launch. Where launches run it is not called.
template <class Tell>
void note(Backend& backend, const Tell& tell) {
  if (backend.records()) {
    static_cast<Recorder&>(backend).note(tell());
  }
}

}  // namespace metal_attn
