// The training loop: the host's side of a run, from the first step to the closing summary.
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

/// What a run is asked besides its configuration.
struct TrainOptions {
  std::string log;          ///< Empty: none; `-`: standard output, and progress goes to standard error.
  bool overwrites = false;  ///< A log and checkpoints of another run may go.
  std::string
      checkpoint_fallback;  ///< Folder for the last checkpoint, should its own not take it; may be empty.
};

class Trainer {
 public:
  /// Throws ConfigError when the log or the folder of checkpoints holds what may not go.
  Trainer(const Config& config, TrainOptions options);

  /// Trains; returns the exit code. Throws what keeps it from starting.
  int run();

 private:
  /// One step and, where it is due, one update and one evaluation. False when the run is over.
  bool step();
  void evaluate();
  void say_what_trains();
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
  StepResult failure_;                   ///< Of the step that ended the run, if one did.
  std::filesystem::path report_folder_;  ///< For the report of a failure.
  std::int64_t saved_step_ = -1;         ///< Of the last checkpoint.
  int recoveries_ = 0;
  bool checkpoint_failed_ = false;
};

}  // namespace accelmgr::program
