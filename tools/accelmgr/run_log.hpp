// The log of a run: JSON lines, one object per step and one for the whole run at its end.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/manager.hpp"
#include "accelmgr/step_result.hpp"
#include "base/unique_fd.hpp"
#include "progress.hpp"

namespace accelmgr::program {

struct LogOptions {
  std::string file;         ///< Empty: no log; `-`: standard output.
  bool resumes = false;     ///< The run may append to the log in the file.
  bool overwrites = false;  ///< The run may overwrite the file.
};

/// A write error does not end the run; missing() says which lines are missing.
class RunLog {
 public:
  /// Opens the file and does not change it. Throws ConfigError if it cannot be opened, or has content that
  /// the options protect.
  explicit RunLog(LogOptions options);

  /// Call it before the first step. `steps` is the number of steps at the resumed checkpoint, or 0. Removes
  /// the lines of later steps and an incomplete last line. Throws ConfigError if the log belongs to another
  /// run, SystemError.
  void begin(const std::string& run_id, std::int64_t steps);
  void step(const StepResult& result, double update_ms, std::optional<double> held_out_loss);
  /// Writes the line for the end of the run. `manager` must still run: the line has the peak memory of its
  /// processes.
  void run(const Config& config, const Summary& summary, const Manager& manager, const std::string& ended);
  /// True if the last line is the one for the end of the run.
  bool ended() const noexcept { return ended_; }

  /// "the steps 3 to 7 and the end of the run: No space left on device"; empty if nothing is missing.
  std::string missing() const;

 private:
  bool write(std::string line);
  void miss(std::int64_t step);

  LogOptions options_;
  base::UniqueFd fd_;
  bool regular_ = false;  ///< A regular file, which can be truncated; not a pipe or a terminal.
  bool ended_ = false;
  std::string run_id_;
  std::vector<std::pair<std::int64_t, std::int64_t>> missing_steps_;  ///< First and last.
  bool missing_end_ = false;
  int why_ = 0;  ///< The errno value of the last line that was not written.
};

}  // namespace accelmgr::program
