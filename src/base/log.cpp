#include "base/log.hpp"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <atomic>
#include <cstdlib>
#include <memory>

#include "accelmgr/errors.hpp"

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

std::shared_ptr<spdlog::logger>& instance() {
  static auto logger =
      std::make_shared<spdlog::logger>("accelmgr", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  return logger;
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
  instance()->set_formatter(std::move(formatter));
  instance()->set_level(level);
  instance()->flush_on(spdlog::level::trace);
}

void set_log_step(std::uint64_t step) noexcept { current_step.store(step, std::memory_order_relaxed); }

spdlog::logger& log() { return *instance(); }

}  // namespace accelmgr::base
