// The log of a run: JSON lines, one object per step and one for the run at its end.
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

/// What is asked of a log.
struct LogOptions {
  std::string file;         ///< Empty: there is none; `-`: standard output.
  bool resumes = false;     ///< The run may go on with what the file holds.
  bool overwrites = false;  ///< What the file holds may go.
};

/// A log that cannot be written is no reason to end a run: what it lacks is told.
class RunLog {
 public:
  /// Opens the file and changes nothing. Throws ConfigError when it cannot be opened, or holds what may not
  /// go.
  explicit RunLog(LogOptions options);

  /// Before the first step: `steps` were made by the part of the run that this one goes on from. Cuts off the
  /// lines of later ones, and one that was not written to its end. Throws ConfigError for the log of another
  /// run.
  void begin(const std::string& run_id, std::int64_t steps);
  void step(const StepResult& result, double update_ms, std::optional<double> held_out_loss);
  /// `manager` still runs: its processes are asked for their peak memory.
  void run(const Config& config, const Summary& summary, const Manager& manager, const std::string& ended);
  /// Whether its last line tells the end of the run.
  bool ended() const noexcept { return ended_; }

  /// "the steps 3 to 7 and the end of the run: No space left on device"; empty when all is written.
  std::string missing() const;

 private:
  bool write(std::string line);
  void miss(std::int64_t step);

  LogOptions options_;
  base::UniqueFd fd_;
  bool regular_ = false;  ///< A file that can be cut: no pipe, no terminal.
  bool ended_ = false;
  std::string run_id_;
  std::vector<std::pair<std::int64_t, std::int64_t>> missing_steps_;  ///< First and last.
  bool missing_end_ = false;
  int why_ = 0;  ///< An errno value, of the last line that was not written.
};

}  // namespace accelmgr::program
