#include "progress.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/clock.hpp"
#include "standard_output.hpp"

namespace accelmgr::program {
namespace {

constexpr double terminal_every_s = 0.1;

/// A terminal without TERM, or with TERM=dumb, may not know escape sequences.
bool can_rewrite_lines(std::FILE* stream) {
  const char* kind = std::getenv("TERM");
  return isatty(fileno(stream)) == 1 && kind != nullptr && *kind != '\0' && std::string_view(kind) != "dumb";
}

std::string clock_time(double seconds) {
  const auto s = static_cast<long>(seconds + 0.5);
  return s < 3600 ? fmt::format("{:02}:{:02}", s / 60, s % 60)
                  : fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

}  // namespace

void Summary::add(const StepResult& result, double update) {
  if (steps == resumed_at) first_loss = result.loss;
  ++steps;
  last_loss = result.loss;
  samples += result.samples;
  step_ms += result.step_ms;
  compute_ms += result.compute_ms;
  update_ms += update;
}

double Summary::samples_per_s() const {
  const double busy_ms = step_ms + update_ms;
  return busy_ms > 0 ? double(samples) / busy_ms * 1e3 : 0;
}

double Summary::outside_model() const { return step_ms > 0 ? std::max(0.0, 1 - compute_ms / step_ms) : 0; }

Progress::Progress(std::FILE* stream, std::int64_t total_steps, double every_s)
    : stream_(stream),
      terminal_(can_rewrite_lines(stream)),
      total_steps_(total_steps),
      every_ns_(static_cast<std::int64_t>((terminal_ ? terminal_every_s : every_s) * 1e9)) {}

std::string Progress::line(const Summary& summary, const StepResult& result, double update_ms) const {
  const double per_step_s = (summary.step_ms + summary.update_ms + summary.evaluate_ms) / 1e3 /
                            double(summary.steps - summary.resumed_at);
  return fmt::format("step {}/{}  loss {:.4f}  {:.0f} samples/s  {:.1f} ms/step  {} left", summary.steps,
                     total_steps_, result.loss, summary.samples_per_s(), result.step_ms + update_ms,
                     clock_time(per_step_s * double(total_steps_ - summary.steps)));
}

void Progress::step(const Summary& summary, const StepResult& result, double update_ms) {
  const auto now = base::now_ns();
  const bool last = summary.steps == total_steps_;
  if (now - shown_ns_ < every_ns_ && !last) return;
  shown_ns_ = now;
  if (terminal_) {
    print(fmt::format("\r\033[K{}", line(summary, result, update_ms)));
    line_open_ = true;
  } else {
    say(line(summary, result, update_ms));
  }
}

void Progress::held_out(const Summary& summary, double loss) {
  say(fmt::format("step {}/{}  held-out loss {:.4f}", summary.steps, total_steps_, loss));
}

void Progress::say(const std::string& line) {
  print(fmt::format("{}{}\n", line_open_ ? "\n" : "", line));
  line_open_ = false;
}

void Progress::print(const std::string& text) const {
  if (stream_ == stdout)
    print_out(text);
  else
    fmt::print(stream_, "{}", text);
}

std::string closing_summary(const Summary& s) {
  std::string text = fmt::format("{} steps, {} samples in {:.1f} s", s.steps, s.samples, s.seconds);
  if (s.steps == s.resumed_at) return text;
  text += fmt::format("; loss {:.4f} -> {:.4f}", s.first_loss, s.last_loss);
  if (s.last_held_out)
    text += fmt::format("; held-out {:.4f} -> {:.4f}", *s.first_held_out, *s.last_held_out);
  text += fmt::format("; {:.0f} samples/s; {:.1f}% of step time outside the model", s.samples_per_s(),
                      100 * s.outside_model());
  return text;
}

}  // namespace accelmgr::program
