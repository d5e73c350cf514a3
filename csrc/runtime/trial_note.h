// A note on disk that a trial has begun, for later processes if the trial crashes this one.
#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace metal_attn {

struct BegunTrial {
  // Removes the note when the last copy is destroyed. Null without a note.
  std::shared_ptr<const void> note;
  std::string problem;  // the reason not to begin, or ""
};

// Writes a note to `path`, which is unique for GPU, system and package. If an earlier process began
// the trial and never ended it, there is a problem, unless `again` is true. If a running process
// has begun it, waits for it until `limit` after its beginning. If the note cannot be written, the
// trial begins without one.
BegunTrial begin_trial(const std::string& path, std::chrono::milliseconds limit, bool again);

}  // namespace metal_attn
