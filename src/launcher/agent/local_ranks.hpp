// The processes of one node in one attempt: starts them, forwards their output and reports their ends.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/ipc/descriptor_watch.hpp"
#include "base/unique_fd.hpp"
#include "launcher/agent/failure_summary.hpp"
#include "launcher/agent/rank_output.hpp"
#include "launcher/agent/terminal.hpp"
#include "launcher/launch/plan/launch_spec.hpp"
#include "launcher/launch/plan/node_info.hpp"
#include "launcher/launch/run/ports.hpp"
#include "launcher/launch/run/spawner.hpp"

namespace accelmgr::agent {

/// Makes a folder and its parents. Throws ConfigError.
void make_log_folder(const std::filesystem::path& folder);

struct Attempt {
  int number = 0;
  std::map<std::string, std::string> environment = {};  ///< Added to child_environment() of every process.
};

/// Only the thread of the loop may call.
class LocalRanks {
 public:
  struct Settings {
    std::vector<std::string> program;
    bool prefix = true;
    std::filesystem::path log_directory;  ///< Empty: the output goes only to the terminal.
  };
  struct Events {
    std::function<void(int local_rank)> ended;
    std::function<void(std::string how)> fork_server_ended;  ///< All processes have ended with it.
  };

  LocalRanks(boost::asio::io_context& loop, launch::Spawner spawner, Terminal& terminal, Settings settings,
             Events events);

  /// Call it when no process of the last attempt is left. Throws SystemError, SessionError if the fork server
  /// is gone, ConfigError if a folder for the output cannot be made.
  void start(const launch::LaunchSpec& spec, const launch::NodeInfo& node_info,
             const launch::WorkerPorts& ports, const Attempt& attempt);

  /// The number of processes whose end has not been reported.
  int running() const noexcept;
  bool has_ended(int local_rank) const;      ///< True even if the end has not been reported yet.
  bool has_succeeded(int local_rank) const;  ///< Exit code 0.
  int count() const noexcept { return static_cast<int>(ranks_.size()); }
  /// The end of this process must have been reported.
  Failure failure_of(int local_rank) const;

  /// Sends a signal to the process groups of all processes.
  void signal(int number) noexcept { spawner_.signal(number); }
  /// Handles the events that the fork server has already sent.
  void take_events();
  /// Ends the fork server and all processes. Blocks until the deadline at most.
  void stop(base::Deadline deadline) noexcept;

 private:
  struct Rank {
    int rank = -1;
    pid_t pid = 0;
    base::UniqueFd pidfd;
    base::UniqueFd report;      ///< Socket on which the child reports that the program cannot be executed.
    base::UniqueFd error_file;  ///< A memfd in which the program describes its failure.
    std::filesystem::path folder;
    std::vector<std::unique_ptr<RankOutput>> outputs;
    std::vector<std::unique_ptr<ipc::Watch>> watches;  ///< Of each output; null if paused or ended.
    std::optional<ipc::Ended> end;
  };

  void start_rank(int local_rank, const launch::LaunchSpec& spec, const launch::NodeInfo& node_info,
                  const launch::WorkerPorts& ports, const Attempt& attempt);
  void make_outputs(Rank& rank, int attempt);
  std::string make_error_file(Rank& rank);
  void watch_output(int local_rank, std::size_t output);
  void take_event(const ipc::Event& event);
  void pump();

  boost::asio::io_context& loop_;
  launch::Spawner spawner_;
  Terminal& terminal_;
  Settings settings_;
  Events events_;
  std::string hostname_;
  int node_rank_ = 0;
  base::UniqueFd no_input_;
  std::vector<Rank> ranks_;
  std::unique_ptr<ipc::Watch> spawner_watch_;
  boost::asio::steady_timer pump_timer_;
  bool pumping_ = false;
  bool fork_server_lost_ = false;  ///< Events::fork_server_ended was called.
};

}  // namespace accelmgr::agent
