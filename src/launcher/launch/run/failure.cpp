#include "launcher/launch/run/failure.hpp"

#include <cxxabi.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "base/ipc/fork_server.hpp"
#include "base/ipc/process.hpp"
#include "base/log.hpp"
#include "base/real_time.hpp"
#include "launcher/launch/plan/variables.hpp"

namespace accelmgr::launch {
namespace {

std::string current_type() {
  const auto* type = abi::__cxa_current_exception_type();
  if (type == nullptr) return "unknown";
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(type->name(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? name.get() : type->name();
}

/// Removes the C++ stack that torch appends to the text of its errors, and logs the full text. This floor
/// does not link torch, so it recognizes the stack by its first line.
std::string without_frames(std::string what) {
  const auto frames = what.find("\nException raised from ");
  if (frames == std::string::npos) return what;
  base::log().debug("{}", what);
  what.erase(frames);
  return what;
}

/// Adds a line to the trace for `error` and for each exception nested in it. The outermost one gives the
/// failure's type and text.
void add_trace(const std::exception_ptr& error, int depth, Failure& failure) {
  if (depth == max_trace) {
    failure.trace += fmt::format("#{} and so on\n", depth);
    return;
  }
  std::string type, what;
  std::exception_ptr nested;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    type = current_type();
    what = without_frames(exception.what());
    if (const auto* outer = dynamic_cast<const std::nested_exception*>(&exception))
      nested = outer->nested_ptr();
  } catch (...) {
    type = current_type();
  }
  if (what.empty()) what = "(no message)";
  if (depth == 0) {
    failure.type = type;
    failure.what = what;
  }
  failure.trace += fmt::format("#{} {}: {}\n", depth, type, what);
  if (nested) add_trace(nested, depth + 1, failure);
}

std::string text_of(const Failure& first, const std::vector<Failure>& later) {
  auto text = describe(first);
  if (!first.trace.empty()) text += "\n" + first.trace;
  if (!later.empty()) {
    text += text.ends_with('\n') ? "" : "\n";
    text += "later failures:";
    for (const auto& failure : later) text += "\n  " + describe(failure);
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

}  // namespace

Failure failure_of(const std::exception_ptr& error, int rank, const std::string& phase) {
  Failure failure;
  failure.rank = rank;
  ipc::set_exit(failure, W_EXITCODE(ipc::exit_uncaught, 0));
  failure.phase = phase;
  failure.time_s = static_cast<double>(base::real_time_ns()) / 1e9;
  try {
    std::rethrow_exception(error);
  } catch (const ForeignException& foreign) {
    failure.type = foreign.type();
    failure.what = foreign.what();
    failure.trace = foreign.trace();
  } catch (...) {
    add_trace(error, 0, failure);
  }
  return failure;
}

void print_failure(const Failure& failure, const std::string& device) noexcept {
  try {
    const auto text = fmt::format("Exception in device={}: {}\n{}", device, failure.what, failure.trace);
    [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
  } catch (const std::exception&) {
    // The launching process gets the failure too.
  }
}

void write_error_file(const Failure& failure) noexcept {
  const char* path = std::getenv(variable::error_file);
  if (path == nullptr || *path == 0) return;
  try {
    const Value record = {{"message",
                           {{"message", fmt::format("{}: {}", failure.type, failure.what)},
                            {"extraInfo",
                             {{"py_callstack", failure.trace},
                              {"timestamp", std::to_string(static_cast<long long>(failure.time_s))}}}}}};
    std::ofstream(path) << record.dump(-1, ' ', false, Value::error_handler_t::replace) << '\n';
  } catch (const std::exception&) {
    // The launching process gets the failure too.
  }
}

std::string describe(const Failure& failure) {
  const auto who = failure.rank < 0 ? std::string("the launch") : fmt::format("rank {}", failure.rank);
  if (failure.signal != 0) return fmt::format("{} was {}", who, failure.exit);
  if (failure.what.empty()) return fmt::format("{} ended with {}", who, failure.exit);
  const auto where = failure.phase.empty() || failure.phase == "function"
                         ? std::string()
                         : fmt::format(" in its {}", failure.phase);
  const auto type = failure.type.empty() ? std::string() : failure.type + ": ";
  return fmt::format("{} failed{}: {}{}{}", who, where, type, failure.what,
                     failure.exit_code == 0 ? "" : fmt::format(" ({})", failure.exit));
}

SpawnError::SpawnError(Failure first, std::vector<Failure> later)
    : Error(text_of(first, later)), first_(std::move(first)), later_(std::move(later)) {}

}  // namespace accelmgr::launch
