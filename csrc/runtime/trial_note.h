// A note on disk that a trial has begun, for the process after one that the trial ended.
#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace metal_attn {

struct BegunTrial {
  // Removes the note when its last copy is gone; null without a note.
  std::shared_ptr<const void> note;
  std::string problem;  // the reason not to begin; "" if the trial may begin
};

// Leaves a note at `path`, which is unique for GPU, system and package. There is a problem if an
// earlier process began the trial and never ended it, unless it is tried `again`. Waits for a
// living process's trial until `limit` after its beginning. If no note can be written, the trial
// begins without one.
BegunTrial begin_trial(const std::string& path, std::chrono::milliseconds limit, bool again);

}  // namespace metal_attn
