// The training loop of the host, from the first step to the closing summary.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/evaluator.hpp"
#include "accelmgr/manager.hpp"
#include "accelmgr/optimizer.hpp"
#include "progress.hpp"
#include "run_log.hpp"

namespace accelmgr::program {

/// Options of a run besides its configuration.
struct TrainOptions {
  std::string log;          ///< Empty: none; `-`: standard output, and progress goes to standard error.
  bool overwrites = false;  ///< The log and the checkpoints of another run may be overwritten.
  std::string
      checkpoint_fallback;  ///< Folder for the last checkpoint if its own cannot take it; may be empty.
};

class Trainer {
 public:
  /// Throws ConfigError if the log or the checkpoint folder has content that the options protect.
  Trainer(const Config& config, TrainOptions options);

  /// Trains; returns the exit code. Blocks. Throws if the run cannot start.
  int run();

 private:
  /// Makes one step and, if due, an update and an evaluation. False if the run is over.
  bool step();
  void evaluate();
  /// `asked`: `runners.device` as it was before the start.
  void say_what_trains(Device asked);
  void begin_files();
  void resume(const Resumed& from);
  void compare(const std::string& configuration) const;
  int nothing_to_do();
  void recover(const StepResult& result);
  CheckpointExtras extras() const;
  void save_checkpoint();
  void show_checkpoints(double wait_s);
  void save_last_checkpoint();
  bool save_elsewhere(const std::filesystem::path& folder);
  bool say_missing() const;
  int finish();

  Config config_;
  TrainOptions options_;
  RunLog log_;
  Progress progress_;
  std::optional<Manager> manager_;
  std::optional<Optimizer> optimizer_;
  std::optional<Evaluator> evaluator_;
  Summary summary_;
  StepResult failure_;                   ///< The result of the step that ended the run, if one did.
  std::filesystem::path report_folder_;  ///< For the report of a failure.
  std::int64_t saved_step_ = -1;         ///< The step of the last checkpoint.
  int recoveries_ = 0;
  bool checkpoint_failed_ = false;
};

}  // namespace accelmgr::program
