#include "csrc/runtime/trial_note.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <filesystem>
#include <system_error>
#include <thread>
#include <utility>

namespace metal_attn {
namespace {

// Time between two checks of another process's trial.
constexpr std::chrono::milliseconds kPause(20);

// The lock is released when its process or the system crashes.
class Note {
 public:
  Note(std::string path, int file) : path_(std::move(path)), file_(file) {}
  Note(const Note&) = delete;
  ~Note() {
    unlink(path_.c_str());
    flock(file_, LOCK_UN);  // forked children still have the file open
    close(file_);
  }

 private:
  const std::string path_;
  const int file_;
};

bool is_at(const struct stat& file, const std::string& path) {
  struct stat there{};
  return stat(path.c_str(), &there) == 0 && there.st_ino == file.st_ino &&
         there.st_dev == file.st_dev;
}

}  // namespace

TrialStart begin_trial(const std::string& path, std::chrono::milliseconds limit, bool again) {
  if (path.empty()) { return {}; }
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  for (std::chrono::milliseconds waited{0};; waited += kPause) {
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) { return {}; }
    const int problem = flock(file, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    struct stat status{};
    fstat(file, &status);
    if (problem == 0) {
      if (!is_at(status, path)) {  // another process has just removed it
        close(file);
        continue;
      }
      if (status.st_size > 0 && !again) {
        close(file);
        return {nullptr, "an earlier process began to try tensor tiles and did not finish"};
      }
      const std::string text = std::to_string(getpid()) + "\n";
      if (ftruncate(file, 0) == 0 && write(file, text.data(), text.size()) > 0) { fsync(file); }
      return {std::make_shared<const Note>(path, file), ""};
    }
    close(file);
    if (problem != EWOULDBLOCK) { return {}; }  // a file system without locks
    const std::chrono::seconds age(std::time(nullptr) - status.st_mtime);
    if (age > limit || waited > limit) {
      const std::string seconds = std::to_string(age.count()) + " s";
      return {nullptr, "another process has been trying tensor tiles for " + seconds};
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace metal_attn
