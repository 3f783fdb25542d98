// Logging of all processes through spdlog, to standard error, with time, level, process name and step. The
// last lines also go to memory that other processes read after this one has died. Synchronous, for forks.
#pragma once

#include <fmt/core.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace spdlog {
class logger;
}

namespace accelmgr::base {

/// Puts the name of this process ("host", "manager", "rank 1") into every following line. The level is that
/// of ACCELMGR_LOG_LEVEL (names of spdlog; default `warning`). Call it before the process has threads; the
/// last call counts.
/// Throws ConfigError for an unknown level.
void start_logging(const std::string& process);

/// Also writes every following line of level info and above into the ring `text`, at any level of standard
/// error; base/log_tail.hpp describes the ring and reads it. A second call replaces the ring. A child made by
/// fork() writes into the ring of its parent, so it must call one of these two functions, which may come
/// before or after start_logging().
/// Requires: no other thread logs during the call. `text` and `written` stay valid until drop_log_tail() or
/// the end of the process.
void keep_log_tail(std::span<char> text, std::atomic<std::uint64_t>& written);
void drop_log_tail();

/// Sets the step that the following lines of this process show: the one under way, counted from 1.
void set_log_step(std::uint64_t step) noexcept;
/// The step set last; 0 if none was.
std::uint64_t log_step() noexcept;

enum class LogLevel { debug, info, warning, error };

/// Writes lines: log().info("runner {} is ready", rank). A line is formatted only if its level is shown.
/// spdlog's own templates would be compiled into each source that logs; here they are compiled once.
class Logger {
 public:
  /// True if a line of this level would be written somewhere.
  bool shows(LogLevel level) const noexcept;

  template <typename... T>
  void log(LogLevel level, fmt::format_string<T...> format, T&&... values) {
    if (shows(level)) write(level, format, fmt::make_format_args(values...));
  }
  template <typename... T>
  void debug(fmt::format_string<T...> format, T&&... values) {
    log(LogLevel::debug, format, std::forward<T>(values)...);
  }
  template <typename... T>
  void info(fmt::format_string<T...> format, T&&... values) {
    log(LogLevel::info, format, std::forward<T>(values)...);
  }
  template <typename... T>
  void warn(fmt::format_string<T...> format, T&&... values) {
    log(LogLevel::warning, format, std::forward<T>(values)...);
  }
  template <typename... T>
  void error(fmt::format_string<T...> format, T&&... values) {
    log(LogLevel::error, format, std::forward<T>(values)...);
  }

  /// The logger underneath: sinks and levels.
  spdlog::logger& spdlog() const noexcept;

 private:
  void write(LogLevel level, fmt::string_view format, fmt::format_args values) const noexcept;
};

/// The logger of accelmgr. Usable before start_logging(), and by any thread.
Logger log() noexcept;

}  // namespace accelmgr::base
