#include "base/log.hpp"

#include <poll.h>
#include <pthread.h>
#include <spdlog/details/console_globals.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/log_tail.hpp"

namespace accelmgr::base {
namespace {

std::atomic<std::uint64_t> current_step{0};

class StepFlag : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg&, const std::tm&, spdlog::memory_buf_t& out) override {
    fmt::format_to(std::back_inserter(out), "{}", current_step.load(std::memory_order_relaxed));
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<StepFlag>(); }
};

class TailSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  TailSink(std::span<char> text, std::atomic<std::uint64_t>& written) : text_(text), written_(written) {
    set_level(spdlog::level::info);
  }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    append_to_tail(text_, written_, {line.data(), line.size()});
  }
  void flush_() override {}

  std::span<char> text_;
  std::atomic<std::uint64_t>& written_;
};

/// Standard error, whose reader may have stopped reading: a pipe that is full would hold up a supervisor for
/// ever. Lines that find no room within the patience are left out, and the next one says how many.
class StandardError : public spdlog::sinks::sink {
 public:
  /// -1: for ever. A host waits as it does for its own prints.
  void set_patience_ms(int patience_ms) noexcept { patience_ms_ = patience_ms; }

  void log(const spdlog::details::log_msg& message) override {
    const std::lock_guard lock(spdlog::details::console_mutex::mutex());
    spdlog::memory_buf_t line;
    if (left_out_ > 0)
      fmt::format_to(std::back_inserter(line),
                     "\n{} lines of the log are left out here: they were not read\n", left_out_);
    formatter_->format(message, line);
    left_out_ = write_all({line.data(), line.size()}) ? 0 : left_out_ + 1;
  }
  void flush() override {}
  void set_pattern(const std::string& pattern) override {
    set_formatter(std::make_unique<spdlog::pattern_formatter>(pattern));
  }
  void set_formatter(std::unique_ptr<spdlog::formatter> formatter) override {
    const std::lock_guard lock(spdlog::details::console_mutex::mutex());
    formatter_ = std::move(formatter);
  }

 private:
  bool write_all(std::string_view text) const noexcept {
    while (!text.empty()) {
      pollfd entry{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
      const int ready = poll(&entry, 1, left_out_ > 0 ? 0 : patience_ms_);
      if (ready < 0 && errno == EINTR) continue;
      if (ready <= 0) return false;
      // A pipe that is ready has room for PIPE_BUF bytes.
      const auto written = write(STDERR_FILENO, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return errno != EAGAIN;  // Else there is nobody to tell.
      text.remove_prefix(static_cast<std::size_t>(written));
    }
    return true;
  }

  std::unique_ptr<spdlog::formatter> formatter_ = std::make_unique<spdlog::pattern_formatter>();
  int patience_ms_ = -1;
  std::uint64_t left_out_ = 0;
};

/// The logger, its sinks and its formatter. Each sink has its own level.
struct Logging {
  Logging() {
    standard_error->set_level(spdlog::level::info);
    logger.flush_on(spdlog::level::trace);
    // A child forked while another thread writes a line would inherit a mutex that stays locked.
    pthread_atfork([] { spdlog::details::console_mutex::mutex().lock(); },
                   [] { spdlog::details::console_mutex::mutex().unlock(); },
                   [] { spdlog::details::console_mutex::mutex().unlock(); });
  }
  /// Call after a change of sinks, levels or formatter.
  void apply() {
    logger.sinks() = {standard_error};
    if (tail) logger.sinks().push_back(tail);
    logger.set_formatter(formatter->clone());
    logger.set_level(tail ? std::min(standard_error->level(), tail->level()) : standard_error->level());
  }

  std::shared_ptr<StandardError> standard_error = std::make_shared<StandardError>();
  std::shared_ptr<TailSink> tail;  ///< Null: no log tail is kept.
  std::unique_ptr<spdlog::formatter> formatter = std::make_unique<spdlog::pattern_formatter>();
  spdlog::logger logger{"accelmgr", standard_error};
};

Logging& instance() {
  static Logging logging;
  return logging;
}

constexpr spdlog::level::level_enum spdlog_level(LogLevel level) noexcept {
  constexpr spdlog::level::level_enum levels[]{spdlog::level::debug, spdlog::level::info, spdlog::level::warn,
                                               spdlog::level::err};
  return levels[static_cast<std::size_t>(level)];
}

}  // namespace

void start_logging(const std::string& process) {
  auto level = spdlog::level::warn;
  if (const char* name = std::getenv("ACCELMGR_LOG_LEVEL")) {
    level = spdlog::level::from_str(name);
    if (level == spdlog::level::off && std::string(name) != "off")
      throw ConfigError(fmt::format(
          "ACCELMGR_LOG_LEVEL is '{}'; it must be trace, debug, info, warning, error, critical or off",
          name));
  }
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  formatter->add_flag<StepFlag>('*').set_pattern("%H:%M:%S.%e %l [" + process + " step %*] %v");
  instance().formatter = std::move(formatter);
  instance().standard_error->set_level(level);
  constexpr int patience_ms = 1000;
  instance().standard_error->set_patience_ms(process == "host" ? -1 : patience_ms);
  instance().apply();
}

void keep_log_tail(std::span<char> text, std::atomic<std::uint64_t>& written) {
  instance().tail = std::make_shared<TailSink>(text, written);
  instance().apply();
}

void drop_log_tail() {
  instance().tail.reset();
  instance().apply();
}

void set_log_step(std::uint64_t step) noexcept { current_step.store(step, std::memory_order_relaxed); }

std::uint64_t log_step() noexcept { return current_step.load(std::memory_order_relaxed); }

bool Logger::shows(LogLevel level) const noexcept { return spdlog().should_log(spdlog_level(level)); }

spdlog::logger& Logger::spdlog() const noexcept { return instance().logger; }

void Logger::write(LogLevel level, fmt::string_view format, fmt::format_args values) const noexcept {
  try {
    spdlog::memory_buf_t line;
    fmt::vformat_to(fmt::appender(line), format, values);
    spdlog().log(spdlog_level(level), spdlog::string_view_t(line.data(), line.size()));
  } catch (const std::exception&) {  // There is no memory for the values.
    spdlog().log(spdlog_level(level), spdlog::string_view_t(format.data(), format.size()));
  }
}

Logger log() noexcept { return {}; }

}  // namespace accelmgr::base
