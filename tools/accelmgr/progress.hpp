// The progress line of a run, and its closing summary.
#pragma once

#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>

#include "accelmgr/step_result.hpp"

namespace accelmgr::program {

/// The totals of a run.
struct Summary {
  std::int64_t steps = 0;  ///< Counted steps, including those before a resumed checkpoint.
  std::int64_t resumed_at =
      0;  ///< Steps before the resumed checkpoint; 0 for a new run. The fields below are without them.
  std::uint64_t samples = 0;
  double first_loss = std::numeric_limits<double>::quiet_NaN();
  double last_loss = std::numeric_limits<double>::quiet_NaN();
  std::optional<double> first_held_out, last_held_out;
  double step_ms = 0, compute_ms = 0, update_ms = 0;  ///< Sums.
  double evaluate_ms = 0;
  double seconds = 0;  ///< Of all steps, updates and evaluations.

  void add(const StepResult& result, double update_ms);
  double samples_per_s() const;  ///< Without the time of evaluations.
  /// The share of step time in which no model computed.
  double outside_model() const;
};

/// On a terminal: one line that is rewritten. Elsewhere: a line every `every_s` seconds.
class Progress {
 public:
  /// `stream` is standard output, or standard error if the log goes to standard output.
  Progress(std::FILE* stream, std::int64_t total_steps, double every_s);

  void step(const Summary& summary, const StepResult& result, double update_ms);
  void held_out(const Summary& summary, double loss);
  /// Prints a line of its own.
  void say(const std::string& line);

 private:
  std::string line(const Summary& summary, const StepResult& result, double update_ms) const;
  void print(const std::string& text) const;

  std::FILE* stream_;
  bool terminal_;
  std::int64_t total_steps_;
  std::int64_t every_ns_;
  std::int64_t shown_ns_ = 0;
  bool line_open_ = false;
};

std::string closing_summary(const Summary& summary);

}  // namespace accelmgr::program
