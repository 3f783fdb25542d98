#include "base/log.hpp"

#include <pthread.h>
#include <spdlog/details/console_globals.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>

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

/// The logger and what it is made of, each sink with a level of its own.
struct Logging {
  Logging() {
    standard_error->set_level(spdlog::level::info);
    logger.flush_on(spdlog::level::trace);
    // A process forked while another thread writes a line would have the lock, and nobody to open it.
    pthread_atfork([] { spdlog::details::console_mutex::mutex().lock(); },
                   [] { spdlog::details::console_mutex::mutex().unlock(); },
                   [] { spdlog::details::console_mutex::mutex().unlock(); });
  }
  /// After a change of sinks, levels or formatter.
  void apply() {
    logger.sinks() = {standard_error};
    if (tail) logger.sinks().push_back(tail);
    logger.set_formatter(formatter->clone());
    logger.set_level(tail ? std::min(standard_error->level(), tail->level()) : standard_error->level());
  }

  std::shared_ptr<spdlog::sinks::sink> standard_error = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  std::shared_ptr<TailSink> tail;  ///< Null: none is kept.
  std::unique_ptr<spdlog::formatter> formatter = std::make_unique<spdlog::pattern_formatter>();
  spdlog::logger logger{"accelmgr", standard_error};
};

Logging& instance() {
  static Logging logging;
  return logging;
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

spdlog::logger& log() { return instance().logger; }

}  // namespace accelmgr::base
