// Saved states: what the server remembers of a text, in a file that a request may name.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "k3/base/status.h"
#include "k3/runtime/snapshot_file.h"
#include "k3/runtime/token_model.h"
#include "k3/serve/api_error.h"

namespace k3::serve {

/// The files of one folder. A name has 1 to 128 characters of [A-Za-z0-9._-] and no dot at its
/// start. A file is written beside its name and renamed, mode 0600. Symbolic links are not
/// followed, and files that do not begin as saved states do are neither read, replaced nor deleted.
///
/// Errors: 400 of a name, of what lies under it, of a damaged file or one of another model or
/// arithmetic (code "invalid_state"), 400 when the folder is full ("state_dir_full"), 404 when
/// there is no such file, 500 of the file system. They do not name the folder.
///
/// Save, Restore and Erase block; they are for the thread that Post runs things on.
class StateFiles {
 public:
  struct Limits {
    std::int64_t bytes = std::int64_t{1} << 30;  // of all files in the folder, and of each
    std::int64_t files = 1024;
  };

  /// The folder has to exist. `model` outlives this; only what does not compute is used.
  static Result<std::unique_ptr<StateFiles>> Open(std::string dir, Limits limits,
                                                  const TokenModel& model);
  /// Does what was posted before, then ends.
  ~StateFiles();

  static ApiStatus CheckName(std::string_view name);
  /// What can be known before there is something to save.
  ApiStatus CheckTarget(const std::string& name) const;

  ApiStatus Save(const std::string& name, const std::vector<SavedSnapshot>& list,
                 std::int64_t& bytes) const;
  ApiStatus Restore(const std::string& name, std::vector<SavedSnapshot>& list,
                    std::int64_t& bytes) const;
  ApiStatus Erase(const std::string& name, std::int64_t& bytes) const;

  /// Calls `task` on the thread for files; false when several wait already.
  bool Post(std::function<void()> task);

  const TokenModel& model() const { return model_; }
  const Limits& limits() const { return limits_; }

 private:
  StateFiles(std::string dir, int fd, Limits limits, const TokenModel& model);
  ApiStatus CheckRoom(const std::string& name, std::int64_t bytes) const;
  ApiStatus OpenFile(const std::string& name, int& fd, std::int64_t& bytes) const;
  void Run();

  const std::string dir_;
  const int fd_;  // of the folder
  const Limits limits_;
  const TokenModel& model_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;  // guarded by mutex_
  bool stop_ = false;                        // guarded by mutex_
  std::thread thread_;
};

}  // namespace k3::serve
