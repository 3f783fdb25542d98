#include "run_log.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>

#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"
#include "base/ipc/cores.hpp"
#include "base/ipc/process.hpp"
#include "log_file.hpp"

namespace accelmgr::program {
namespace {

using nlohmann::ordered_json;

// JSON has no NaN and no infinity.
ordered_json number(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr);
}

std::string cpu_model() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown";
}

ordered_json about_machine() {
  utsname system{};
  uname(&system);
  return {{"cpu", cpu_model()},
          {"cores", ipc::allowed_cores()},
          {"kernel", system.release},
          {"architecture", system.machine}};
}

}  // namespace

RunLog::RunLog(LogOptions options) : options_(std::move(options)) {
  const auto& file = options_.file;
  if (file.empty()) return;
  if (file == "-") {
    fd_ = base::duplicate(STDOUT_FILENO);
    return;
  }
  fd_.reset(open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!fd_) throw ConfigError(fmt::format("--log {}: cannot be written: {}", file, strerrordesc_np(errno)));
  struct stat status {};
  if (fstat(fd_.get(), &status) != 0) throw SystemError(fmt::format("fstat of {}", file), errno);
  regular_ = S_ISREG(status.st_mode);
  if (!regular_ || status.st_size == 0 || options_.overwrites) return;
  if (!is_log(file))
    throw ConfigError(fmt::format(
        "--log {}: the file is not a log of `accelmgr train`; name another file, or add --overwrite to "
        "replace it",
        file));
  if (!options_.resumes)
    throw ConfigError(fmt::format(
        "--log {}: the file holds the log of an earlier run; go on with that run (--resume latest), "
        "name another file, or add --overwrite to replace it",
        file));
}

void RunLog::begin(const std::string& run_id, std::int64_t steps) {
  run_id_ = run_id;
  if (!regular_) return;
  const auto& file = options_.file;
  if (flock(fd_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    throw ConfigError(fmt::format("--log {}: another run is writing it", file));
  if (!options_.resumes && !options_.overwrites && lseek(fd_.get(), 0, SEEK_END) > 0)
    throw ConfigError(fmt::format("--log {}: another run has written to it since this one started", file));
  Kept kept;
  if (options_.resumes) try {
      kept = kept_of_log(file, run_id, steps);
    } catch (const ConfigError& error) {
      if (!options_.overwrites)
        throw ConfigError(fmt::format("--log {}: {}; name another file, or add --overwrite to replace it",
                                      file, error.what()));
    }
  // One system call: if this process dies, the file has either all of its lines or the kept ones.
  if (ftruncate(fd_.get(), kept.bytes) != 0 || fsync(fd_.get()) != 0)
    throw SystemError(fmt::format("cutting {} to {} bytes", file, kept.bytes), errno);
  ended_ = kept.ended;
  if (kept.bytes > 0 && kept.last_step < steps)
    fmt::print(stderr, "accelmgr: warning: --log {} lacks steps {} to {} of an earlier part of the run\n",
               file, kept.last_step + 1, steps);
}

// In a regular file a line is written completely or not at all: a partial line is removed again.
bool RunLog::write(std::string line) {
  line += '\n';
  const off_t before = regular_ ? lseek(fd_.get(), 0, SEEK_END) : 0;
  for (std::string_view rest = line; !rest.empty();) {
    const auto count = ::write(fd_.get(), rest.data(), rest.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      why_ = errno;
      if (regular_ && ftruncate(fd_.get(), before) != 0) why_ = errno;
      return false;
    }
    rest.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

void RunLog::miss(std::int64_t step) {
  if (missing_steps_.empty())
    fmt::print(stderr,
               "accelmgr: warning: --log {} cannot be written from step {} on: {}; training goes on\n",
               options_.file, step, strerrordesc_np(why_));
  if (!missing_steps_.empty() && step <= missing_steps_.back().second + 1)
    missing_steps_.back().second = step;
  else
    missing_steps_.emplace_back(step, step);
}

std::string RunLog::missing() const {
  std::vector<std::string> parts;
  for (const auto& [first, last] : missing_steps_)
    parts.push_back(first == last ? fmt::format("step {}", first)
                                  : fmt::format("steps {} to {}", first, last));
  if (missing_end_) parts.push_back("the end of the run");
  return parts.empty() ? "" : fmt::format("{}: {}", fmt::join(parts, ", "), strerrordesc_np(why_));
}

void RunLog::step(const StepResult& r, double update_ms, std::optional<double> held_out_loss) {
  if (!fd_) return;
  ordered_json line{{"step", r.step},
                    {"attempt", r.attempt},
                    {"status", to_string(r.status)},
                    {"counted", r.counted},
                    {"loss", number(r.loss)},
                    {"samples", r.samples},
                    {"step_ms", r.step_ms},
                    {"compute_ms", r.compute_ms},
                    {"reduce_ms", r.reduce_ms},
                    {"wait_ms", r.wait_ms},
                    {"data_ms", r.data_ms},
                    {"update_ms", update_ms},
                    {"parameter_version", r.parameter_version},
                    {"run_id", run_id_}};
  if (held_out_loss) line["held_out_loss"] = number(*held_out_loss);
  for (const auto& [name, value] : r.scalars) line["scalars"][name] = number(value);
  if (!r.error.empty()) line["error"] = r.error;
  ended_ = false;
  if (!write(line.dump(-1, ' ', false, ordered_json::error_handler_t::replace)))
    miss(static_cast<std::int64_t>(r.step));
}

void RunLog::run(const Config& config, const Summary& summary, const Manager& manager,
                 const std::string& ended) {
  if (!fd_) return;
  const auto statistics = manager.statistics();
  ordered_json peak{{"manager", statistics.manager_peak_memory_bytes}, {"runners", ordered_json::array()}};
  if (const auto host = ipc::usage(getpid())) peak["host"] = host->peak_rss_bytes;
  for (const auto& runner : statistics.runners) peak["runners"].push_back(runner.peak_memory_bytes);
  const int cores = ipc::allowed_cores();
  ordered_json run{{"ended", ended},
                   {"run_id", run_id_},
                   {"steps", summary.steps},
                   {"samples", summary.samples},
                   {"seconds", summary.seconds},
                   {"first_loss", number(summary.first_loss)},
                   {"last_loss", number(summary.last_loss)},
                   {"samples_per_s", summary.samples_per_s()},
                   {"share_outside_model", summary.outside_model()},
                   {"threads",
                    {{"host", cores},
                     {"runner", config.runners.threads > 0 ? config.runners.threads
                                                           : std::max(1, cores / config.nprocs)}}},
                   {"versions", {{"accelmgr", ACCELMGR_VERSION}, {"torch", ACCELMGR_TORCH_VERSION}}},
                   {"machine", about_machine()},
                   {"session_bytes", statistics.session_bytes},
                   {"peak_memory_bytes", peak},
                   {"configuration", config::to_yaml(config)}};
  if (summary.last_held_out) run["held_out_loss"] = number(*summary.last_held_out);
  ended_ = write(ordered_json{{"run", run}}.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
  missing_end_ = !ended_;
}

}  // namespace accelmgr::program
