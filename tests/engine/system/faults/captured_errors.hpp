// Captures what this process, and the processes that it starts, write to standard error.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/unique_fd.hpp"

namespace accelmgr::test {

/// At most one may exist at a time. Use it only from one thread.
class CapturedErrors {
 public:
  /// Captures standard error from now on, at log level info.
  CapturedErrors();
  ~CapturedErrors();
  CapturedErrors(const CapturedErrors&) = delete;
  CapturedErrors& operator=(const CapturedErrors&) = delete;

  /// Returns when `text` has been written `times` times. Fails the test after a time limit.
  void wait_for(const std::string& text, int times = 1);
  /// Returns when the manager has logged the loss of a process. Fails the test after a time limit.
  void wait_for_loss();
  /// Restores standard error. Returns when no process can write here any more. Fails the test after a time
  /// limit.
  void finish();

  /// All text that was captured so far.
  const std::string& text() const { return text_; }
  /// The losses in that text, in order: "runner 1: exit code 3".
  std::vector<std::string> losses() const;

 private:
  void restore();
  bool read_more();
  void wait_until(const std::function<bool()>& condition, const std::string& what);

  base::UniqueFd before_;
  base::UniqueFd said_;
  std::string text_;
  bool at_end_ = false;
};

}  // namespace accelmgr::test
