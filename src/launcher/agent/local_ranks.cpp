#include "launcher/agent/local_ranks.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <fstream>

#include "accelmgr/errors.hpp"
#include "base/errno_text.hpp"
#include "base/ipc/process.hpp"
#include "base/timing.hpp"
#include "launcher/launch/plan/child_environment.hpp"
#include "launcher/launch/plan/variables.hpp"

namespace accelmgr::agent {
namespace {

constexpr std::size_t most_pending_bytes = 256 * 1024;  // Beyond it outputs are not read: processes wait.
constexpr std::chrono::milliseconds pump_again{5};
constexpr std::size_t lines_of_a_failure = 20;
constexpr std::size_t most_error_bytes = 1 << 20;

base::UniqueFd no_input() {
  base::UniqueFd nothing(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!nothing) throw SystemError("opening /dev/null", errno);
  return nothing;
}

std::string read_from_start(int fd) {
  std::string text(most_error_bytes, '\0');
  const auto count = pread(fd, text.data(), text.size(), 0);
  text.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
  return text;
}

}  // namespace

void make_log_folder(const std::filesystem::path& folder) {
  std::error_code problem;
  std::filesystem::create_directories(folder, problem);
  if (problem)
    throw ConfigError(fmt::format("cannot make the folder {}: {}", folder.string(), problem.message()),
                      "launch.log_directory");
}

LocalRanks::LocalRanks(boost::asio::io_context& loop, launch::Spawner spawner, Terminal& terminal,
                       Settings settings, Events events)
    : loop_(loop),
      spawner_(std::move(spawner)),
      terminal_(terminal),
      settings_(std::move(settings)),
      events_(std::move(events)),
      no_input_(no_input()),
      pump_timer_(loop) {
  spawner_watch_ = std::make_unique<ipc::Watch>(loop_, spawner_.descriptor(), [this] {
    take_events();
    return true;
  });
}

// ---- Starting ----

void LocalRanks::start(const launch::LaunchSpec& spec, const launch::NodeInfo& node_info,
                       const launch::WorkerPorts& ports, const Attempt& attempt) {
  hostname_ = node_info.hostname;
  node_rank_ = spec.node_rank;
  ranks_.clear();
  for (int local_rank = 0; local_rank < spec.nprocs; ++local_rank) {
    ranks_.emplace_back();
    try {
      start_rank(local_rank, spec, node_info, ports, attempt);
    } catch (...) {
      ranks_.pop_back();  // This rank was not started; the ones before it were.
      throw;
    }
  }
}

void LocalRanks::start_rank(int local_rank, const launch::LaunchSpec& spec, const launch::NodeInfo& node_info,
                            const launch::WorkerPorts& ports, const Attempt& attempt) {
  auto& rank = ranks_[static_cast<std::size_t>(local_rank)];
  rank.rank = spec.rank(local_rank);
  make_outputs(rank, attempt.number);
  launch::Task task;
  task.rank = rank.rank;
  task.program = settings_.program;
  task.environment = launch::child_environment(spec, local_rank, node_info);
  for (const auto& [name, value] : attempt.environment) task.environment[name] = value;
  task.environment[launch::variable::error_file] = make_error_file(rank);
  task.environment["ROLE_RANK"] = task.environment[launch::variable::rank];
  task.environment["ROLE_WORLD_SIZE"] = task.environment[launch::variable::world_size];
  task.environment["ROLE_NAME"] = "default";
  // With a pipe as output Python buffers; the buffer would be lost if the process is killed, else come late.
  if (!rank.outputs.empty()) task.environment.emplace("PYTHONUNBUFFERED", "1");
  auto fds = ports.descriptors(local_rank);
  // Only rank 0 reads standard input; if several did, each would get a part. No rank reads a terminal: the
  // kernel stops a reader that is not in the terminal's foreground process group.
  if (rank.rank != 0 || isatty(STDIN_FILENO) == 1) fds.emplace_back(no_input_.get(), STDIN_FILENO);
  for (const auto& output : rank.outputs) fds.emplace_back(output->write_end(), output->stream());
  rank.report = spawner_.start(local_rank, task, fds);
  rank.watches.resize(rank.outputs.size());
  for (std::size_t i = 0; i < rank.outputs.size(); ++i) {
    rank.outputs[i]->close_write_end();
    watch_output(local_rank, i);
  }
}

void LocalRanks::make_outputs(Rank& rank, int attempt) {
  if (!settings_.log_directory.empty()) {
    rank.folder = settings_.log_directory / fmt::format("attempt_{}", attempt) / std::to_string(rank.rank);
    make_log_folder(rank.folder);
  } else if (!settings_.prefix) {
    return;  // The processes write to the terminal directly.
  }
  const auto prefix = settings_.prefix ? fmt::format("[rank {}] ", rank.rank) : std::string();
  for (const auto& [stream, name] :
       {std::pair{STDOUT_FILENO, "stdout.log"}, std::pair{STDERR_FILENO, "stderr.log"}})
    rank.outputs.push_back(
        std::make_unique<RankOutput>(stream, prefix, rank.folder.empty() ? rank.folder : rank.folder / name));
}

/// A memfd: it needs no folder and replaces no file.
std::string LocalRanks::make_error_file(Rank& rank) {
  rank.error_file.reset(memfd_create("accelmgr-error-file", MFD_CLOEXEC));
  if (!rank.error_file) throw SystemError("memfd_create for an error file", errno);
  return fmt::format("/proc/{}/fd/{}", getpid(), rank.error_file.get());
}

// ---- While they run ----

void LocalRanks::watch_output(int local_rank, std::size_t output) {
  auto& rank = ranks_[static_cast<std::size_t>(local_rank)];
  rank.watches[output] =
      std::make_unique<ipc::Watch>(loop_, rank.outputs[output]->read_end(), [this, local_rank, output] {
        auto& of = ranks_[static_cast<std::size_t>(local_rank)];
        const bool more = of.outputs[output]->take(terminal_);
        pump();
        if (more && terminal_.pending() < most_pending_bytes) return true;
        if (!more) of.outputs[output]->finish(terminal_);
        of.watches[output].reset();
        return false;
      });
}

/// Writes to the terminal, again after a while if it did not take everything. Then resumes paused outputs.
void LocalRanks::pump() {
  terminal_.pump();
  if (terminal_.pending() == 0 || pumping_) return;
  pumping_ = true;
  pump_timer_.expires_after(pump_again);
  pump_timer_.async_wait([this](const boost::system::error_code& error) {
    pumping_ = false;
    if (error) return;
    pump();
    if (terminal_.pending() > most_pending_bytes / 2) return;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
      for (std::size_t i = 0; i < ranks_[rank].outputs.size(); ++i)
        if (!ranks_[rank].watches[i] && ranks_[rank].outputs[i]->read_end() >= 0)
          watch_output(static_cast<int>(rank), i);
  });
}

void LocalRanks::take_events() {
  while (auto event = spawner_.next(base::Deadline::at_ns(0))) take_event(*event);
  if (fork_server_lost_ || spawner_.has_children()) return;
  if (const auto end = spawner_.fork_server_end()) {
    fork_server_lost_ = true;
    events_.fork_server_ended(*end);
  }
}

void LocalRanks::take_event(const ipc::Event& event) {
  if (const auto* started = std::get_if<ipc::Started>(&event)) {
    auto& rank = ranks_.at(static_cast<std::size_t>(started->rank));
    rank.pid = started->pid;
    rank.pidfd = base::duplicate(started->pidfd.get());
    return;
  }
  const auto& ended = std::get<ipc::Ended>(event);
  auto& rank = ranks_.at(static_cast<std::size_t>(ended.rank));
  rank.watches.clear();
  rank.watches.resize(rank.outputs.size());
  for (const auto& output : rank.outputs) output->finish(terminal_);
  pump();
  rank.end = ended;
  if (!ended.with_server) events_.ended(ended.rank);  // Else Events::fork_server_ended tells it.
}

int LocalRanks::running() const noexcept {
  return static_cast<int>(std::ranges::count_if(ranks_, [](const Rank& rank) { return !rank.end; }));
}

bool LocalRanks::has_ended(int local_rank) const {
  const auto& rank = ranks_.at(static_cast<std::size_t>(local_rank));
  return rank.end || ipc::has_ended(rank.pidfd.get());
}

bool LocalRanks::has_succeeded(int local_rank) const {
  const auto& end = ranks_.at(static_cast<std::size_t>(local_rank)).end;
  return end && end->pid != 0 && end->wait_status == 0;
}

Failure LocalRanks::failure_of(int local_rank) const {
  const auto& rank = ranks_.at(static_cast<std::size_t>(local_rank));
  const auto& end = rank.end.value();
  Failure failure{.time_s = static_cast<double>(end.time_ns) / 1e9, .rank = rank.rank, .pid = end.pid};
  failure.local_rank = local_rank;
  failure.node_rank = node_rank_;
  failure.hostname = hostname_;
  ipc::set_exit(failure, end.wait_status);
  take_error_file(read_from_start(rank.error_file.get()), failure);
  if (end.pid == 0)
    failure.what = fmt::format("the process could not be started: {}", base::errno_text(end.error));
  else if (const auto report = launch::read_report(rank.report.get()); report && report->failure)
    failure.what = report->failure->what;
  if (!rank.outputs.empty()) failure.log = rank.outputs.back()->last_lines(lines_of_a_failure);
  if (!rank.folder.empty()) failure.log_folder = std::filesystem::absolute(rank.folder).string();
  return failure;
}

void LocalRanks::stop(base::Deadline deadline) noexcept {
  spawner_watch_.reset();
  spawner_.stop(deadline);
  for (auto& rank : ranks_) {
    rank.watches.clear();
    for (const auto& output : rank.outputs) output->finish(terminal_);
  }
}

}  // namespace accelmgr::agent
