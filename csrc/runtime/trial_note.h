// A note on disk that a trial has begun, for the process after one that the trial ended.
#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace metal_attn {

struct BegunTrial {
  // Removes the note when its last copy is gone; null if nowhere is a note.
  std::shared_ptr<const void> note;
  std::string problem;  // why not to begin; "" if nothing speaks against it
};

// Leaves a note at `path`, of which trials that differ in anything have different ones. There is a
// problem if an earlier process began the trial and never ended it, unless it is tried `again`.
// Waits for a trial of another process that is still alive, but not past `limit` from its begin.
// Without a place for notes, as with an empty path, the trial begins without one.
BegunTrial begin_trial(const std::string& path, std::chrono::milliseconds limit, bool again);

}  // namespace metal_attn
