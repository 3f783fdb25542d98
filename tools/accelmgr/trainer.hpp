// The training loop: the host's side of a run, from the first step to the closing summary.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "accelmgr/config.hpp"
#include "accelmgr/evaluator.hpp"
#include "accelmgr/manager.hpp"
#include "accelmgr/optimizer.hpp"
#include "progress.hpp"
#include "run_log.hpp"

namespace accelmgr::program {

class Trainer {
 public:
  /// `log_file` empty: no log. Throws when the log cannot be opened.
  Trainer(const Config& config, const std::string& log_file);

  /// Trains; returns the exit code. Throws what keeps it from starting.
  int run();

 private:
  /// One step and, where it is due, one update and one evaluation. False when the run is over.
  bool step();
  void evaluate();
  void resume(const Resumed& from);
  void recover(const StepResult& result);
  void save_checkpoint();
  void show_checkpoints(double wait_s);
  int finish();

  Config config_;
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
