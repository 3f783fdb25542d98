// How a child reports the exception that ended it.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "launcher/launch/run/spawner.hpp"

namespace accelmgr::launch {

inline constexpr int max_trace = 16;  ///< Nested exceptions in a trace; deeper ones are left out.

/// An exception of an interpreter (Python), which brings its own type name and trace.
class ForeignException : public std::exception {
 public:
  ForeignException(std::string type, std::string what, std::string trace)
      : type_(std::move(type)), what_(std::move(what)), trace_(std::move(trace)) {}
  const char* what() const noexcept override { return what_.c_str(); }
  const std::string& type() const noexcept { return type_; }
  const std::string& trace() const noexcept { return trace_; }

 private:
  std::string type_, what_, trace_;
};

/// Describes the exception in `error` and those nested in it. The failure's time is the time of this call.
Failure failure_of(const std::exception_ptr& error, int rank, const std::string& phase);

/// Prints "Exception in device=<device>: <what>" and the trace to standard error. It is one write(), so lines
/// of other ranks do not mix with it.
void print_failure(const Failure& failure, const std::string& device) noexcept;

/// Writes the error record that torchrun's tools read to the file $TORCHELASTIC_ERROR_FILE, if that is set.
void write_error_file(const Failure& failure) noexcept;

/// "rank 2 was killed by signal 11 (SEGV)", "rank 1 failed in its setup: std::runtime_error: no data (exit
/// code 17)".
std::string describe(const Failure& failure);

}  // namespace accelmgr::launch
