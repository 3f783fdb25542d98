#include "run_log.hpp"

#include <fmt/core.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "accelmgr/errors.hpp"
#include "config/loader.hpp"
#include "ipc/process.hpp"

namespace accelmgr::program {
namespace {

using json = nlohmann::ordered_json;

// JSON has no NaN and no infinity.
json number(double value) { return std::isfinite(value) ? json(value) : json(nullptr); }

std::string cpu_model() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown";
}

json machine() {
  utsname system{};
  uname(&system);
  return {{"cpu", cpu_model()},
          {"cores", std::thread::hardware_concurrency()},
          {"kernel", system.release},
          {"architecture", system.machine}};
}

}  // namespace

RunLog::RunLog(const std::string& file) : name_(file), file_(nullptr, &std::fclose) {
  if (file.empty()) return;
  file_.reset(std::fopen(file.c_str(), "we"));
  if (!file_) throw ConfigError(fmt::format("--log {}: cannot be written: {}", file, std::strerror(errno)));
}

void RunLog::write(const std::string& line) {
  if (std::fprintf(file_.get(), "%s\n", line.c_str()) < 0 || std::fflush(file_.get()) != 0)
    throw SystemError(fmt::format("writing the log {}", name_), errno);
}

void RunLog::step(const StepResult& r, double update_ms, std::optional<double> held_out_loss) {
  if (!file_) return;
  json line{{"step", r.step},       {"attempt", r.attempt},       {"status", to_string(r.status)},
            {"counted", r.counted}, {"loss", number(r.loss)},     {"samples", r.samples},
            {"step_ms", r.step_ms}, {"compute_ms", r.compute_ms}, {"reduce_ms", r.reduce_ms},
            {"wait_ms", r.wait_ms}, {"update_ms", update_ms},     {"parameter_version", r.parameter_version}};
  if (held_out_loss) line["held_out_loss"] = number(*held_out_loss);
  for (const auto& [name, value] : r.scalars) line["scalars"][name] = number(value);
  if (!r.error.empty()) line["error"] = r.error;
  write(line.dump(-1, ' ', false, json::error_handler_t::replace));
}

void RunLog::run(const Config& config, const Summary& summary, const Manager& manager,
                 const std::string& ended) {
  if (!file_) return;
  const auto statistics = manager.statistics();
  json peak{{"manager", statistics.manager_peak_memory_bytes}, {"runners", json::array()}};
  if (const auto host = ipc::usage(getpid())) peak["host"] = host->peak_rss_bytes;
  for (const auto& runner : statistics.runners) peak["runners"].push_back(runner.peak_memory_bytes);
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  json run{{"ended", ended},
           {"steps", summary.steps},
           {"samples", summary.samples},
           {"seconds", summary.seconds},
           {"first_loss", number(summary.first_loss)},
           {"last_loss", number(summary.last_loss)},
           {"samples_per_s", summary.samples_per_s()},
           {"share_outside_model", summary.outside_model()},
           {"threads",
            {{"host", cores},
             {"runner",
              config.runners.threads > 0 ? config.runners.threads : std::max(1, cores / config.nprocs)}}},
           {"versions", {{"accelmgr", ACCELMGR_VERSION}, {"torch", ACCELMGR_TORCH_VERSION}}},
           {"machine", machine()},
           {"session_bytes", statistics.session_bytes},
           {"peak_memory_bytes", peak},
           {"configuration", config::to_yaml(config)}};
  if (summary.last_held_out) run["held_out_loss"] = number(*summary.last_held_out);
  write(json{{"run", run}}.dump(-1, ' ', false, json::error_handler_t::replace));
}

}  // namespace accelmgr::program
