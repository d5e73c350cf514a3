#include "csrc/ops/common/recorder.h"

#include <utility>

#include "csrc/runtime/pieces.h"

namespace metal_attn {
namespace {

thread_local bool t_recording = false;

}  // namespace

bool is_recording() { return t_recording; }

Recorder::Recorder() : was_recording_(std::exchange(t_recording, true)) {}

Recorder::~Recorder() { t_recording = was_recording_; }

void Recorder::run(const Launch& launch) {
  int64_t written = 0;
  for (const BufferArgument& buffer : launch.buffers) {
    written += buffer.writable ? buffer.tensor->numel() * buffer.tensor->element_size() : 0;
  }
  JsonObject object;
  object.add("kernel", launch.kernel)
      .add("defines", launch.program.defines)
      .add("grid", launch.threadgroups)
      .add("threads", launch.threads)
      .add("pieces", Pieces(launch).count())
      .add("written_bytes", written)
      .append(std::exchange(note_, {}));
  if (Backend* const compiler = compiler_of_recorded()) {
    object.add("compiled", int64_t{compiler->compile(launch)});
  }
  launches_ += (launches_.empty() ? "" : ", ") + object.text();
}

}  // namespace metal_attn
