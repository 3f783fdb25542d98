// Standard output and standard error of the program, shared by many processes that write through it. write()
// and pump() never wait for a reader. The queue of unwritten text is not bounded here: callers look at
// pending().
#pragma once

#include <cstddef>
#include <deque>
#include <string>

#include "base/clock.hpp"

namespace accelmgr::agent {

class Terminal {
 public:
  /// `stream` is 1 or 2. Texts are written in the order of the calls. A text that cannot be written is
  /// dropped.
  void write(int stream, std::string text);

  /// Writes what can be written now.
  void pump();
  /// Bytes that are not written yet.
  std::size_t pending() const noexcept { return pending_; }
  /// Blocks until all is written or the deadline passes.
  void flush(base::Deadline deadline);

  /// The errno value of the first error of standard output; 0 for none. A closed pipe (EPIPE) is not an
  /// error.
  int error() const noexcept { return error_; }

 private:
  struct Text {
    int stream;
    std::string bytes;
  };

  std::deque<Text> queue_;
  std::size_t written_ = 0;  ///< Bytes written of the first text in the queue.
  std::size_t pending_ = 0;
  int error_ = 0;
};

}  // namespace accelmgr::agent
