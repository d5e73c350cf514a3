// A note on disk that a trial has begun, for later processes if the trial crashes this process.
#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace metal_attn {

struct TrialStart {
  // The note is removed when the last copy of this pointer is destroyed. Null without a note.
  std::shared_ptr<const void> note;
  std::string problem;  // the reason not to begin, or ""
};

// Writes a note to `path`, which is unique for GPU, system and package. If an earlier process began
// the trial and never ended it, there is a problem, unless `again` is true. If a running process
// has begun the trial, waits for its end until `limit` after its beginning. If the note cannot be
// written, the trial begins without one.
TrialStart begin_trial(const std::string& path, std::chrono::milliseconds limit, bool again);

}  // namespace metal_attn
