// What this process and those that it starts say on standard error.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/unique_fd.hpp"

namespace accelmgr::test {

/// One at a time. Used by one thread.
class CapturedErrors {
 public:
  /// From now on it is kept here, at log level info.
  CapturedErrors();
  ~CapturedErrors();
  CapturedErrors(const CapturedErrors&) = delete;
  CapturedErrors& operator=(const CapturedErrors&) = delete;

  /// Returns when `text` has been said so many times. Fails the test after a bound.
  void wait_for(const std::string& text, int times = 1);
  /// Returns when the manager has told of the loss of a process. Fails the test after a bound.
  void wait_for_loss();
  /// Standard error is what it was; returns when nobody is left who could write here. Fails the test after a
  /// bound.
  void finish();

  /// All that was said so far.
  const std::string& text() const { return text_; }
  /// Of them, who ended and how, in order: "runner 1: exit code 3".
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
