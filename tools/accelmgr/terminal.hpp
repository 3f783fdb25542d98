// Standard output and standard error of the program, as many processes write to them through it: nothing
// here waits for whoever reads them, and what they have not taken yet is bounded by who writes.
#pragma once

#include <cstddef>
#include <deque>
#include <string>

#include "base/clock.hpp"

namespace accelmgr::program {

class Terminal {
 public:
  /// `stream`: 1 or 2. Texts come out in the order of the calls. One that cannot be written is dropped.
  void write(int stream, std::string text);

  /// Writes what can be written now.
  void pump();
  /// Bytes that are still to be written.
  std::size_t pending() const noexcept { return pending_; }
  /// pump() until all is written, or the deadline.
  void flush(base::Deadline deadline);

  /// Why standard output could not be written, an errno value; 0: it could, or nobody reads it any more.
  int error() const noexcept { return error_; }

 private:
  struct Text {
    int stream;
    std::string bytes;
  };

  std::deque<Text> queue_;
  std::size_t written_ = 0;  ///< Of the first of the queue.
  std::size_t pending_ = 0;
  int error_ = 0;
};

}  // namespace accelmgr::program
