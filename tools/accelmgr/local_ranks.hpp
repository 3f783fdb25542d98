// The processes of one host, in one attempt: started together, their output taken, their ends told.
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

#include "base/unique_fd.hpp"
#include "failure_summary.hpp"
#include "launch/machine.hpp"
#include "launch/plan.hpp"
#include "launch/ports.hpp"
#include "launch/spawner.hpp"
#include "manager/watch.hpp"
#include "rank_output.hpp"
#include "terminal.hpp"

namespace accelmgr::program {

/// With those above it. Throws ConfigError.
void make_log_folder(const std::filesystem::path& folder);

struct Attempt {
  int number = 0;
  std::map<std::string, std::string> environment = {};  ///< For all, besides what child_environment() says.
};

/// Used by the loop's thread alone.
class LocalRanks {
 public:
  struct Settings {
    std::vector<std::string> program;
    bool prefix = true;
    std::filesystem::path log_directory;  ///< Empty: the output goes to the terminal alone.
  };
  struct Events {
    std::function<void(int local_rank)> ended;
    std::function<void(std::string how)> launcher_ended;  ///< And all processes with it.
  };

  LocalRanks(boost::asio::io_context& loop, launch::Spawner spawner, Terminal& terminal, Settings settings,
             Events events);

  /// When none of the last attempt is left. Throws SystemError, ConfigError: a folder of the output that
  /// cannot be made.
  void start(const launch::Plan& plan, const launch::Machine& machine, const launch::WorkerPorts& ports,
             const Attempt& attempt);

  /// Those that have not ended, as far as has been told.
  int running() const noexcept;
  bool has_ended(int local_rank) const;      ///< Told or not.
  bool has_succeeded(int local_rank) const;  ///< Exit code 0.
  int count() const noexcept { return static_cast<int>(ranks_.size()); }
  /// Of one whose end was told.
  RankFailure failure_of(int local_rank) const;

  /// To the process groups of all.
  void signal(int number) noexcept { spawner_.signal(number); }
  /// Takes the ends that the launcher has told already.
  void take_events();
  /// Ends the launcher and all processes.
  void stop(base::Deadline deadline) noexcept;

 private:
  struct Rank {
    int rank = -1;
    pid_t pid = 0;
    base::UniqueFd pidfd;
    base::UniqueFd report;      ///< On which a program that cannot be executed tells so.
    base::UniqueFd error_file;  ///< In memory: what the program says of its failure.
    std::filesystem::path folder;
    std::vector<std::unique_ptr<RankOutput>> outputs;
    std::vector<std::unique_ptr<manager::Watch>> watches;  ///< Of the outputs; null: it waits, or has ended.
    std::optional<ipc::Ended> end;
  };

  void start_rank(int local_rank, const launch::Plan& plan, const launch::Machine& machine,
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
  std::string host_;
  int node_rank_ = 0;
  base::UniqueFd no_input_;
  std::vector<Rank> ranks_;
  std::unique_ptr<manager::Watch> spawner_watch_;
  boost::asio::steady_timer pump_timer_;
  bool pumping_ = false;
};

}  // namespace accelmgr::program
