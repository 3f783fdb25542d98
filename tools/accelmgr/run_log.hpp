// The log of a run: JSON lines, one object per step and one for the run at its end.
#pragma once

#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "accelmgr/config.hpp"
#include "accelmgr/manager.hpp"
#include "accelmgr/step_result.hpp"
#include "progress.hpp"

namespace accelmgr::program {

class RunLog {
 public:
  /// Empty: writes nothing. Throws ConfigError when the file cannot be opened.
  explicit RunLog(const std::string& file);

  void step(const StepResult& result, double update_ms, std::optional<double> held_out_loss);
  /// `manager` still runs: its processes are asked for their peak memory.
  void run(const Config& config, const Summary& summary, const Manager& manager, const std::string& ended);

 private:
  void write(const std::string& line);
  std::string name_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace accelmgr::program
