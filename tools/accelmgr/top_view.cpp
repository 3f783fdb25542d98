#include "top_view.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>

namespace accelmgr::program {
namespace {

using nlohmann::json;

constexpr std::size_t most_steps = 256, narrowest = 40;
constexpr const char* bars[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};

std::string text_of(const json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

/// Cuts a line at `width` columns. Each character of UTF-8 is one column wide here. Text of the user must not
/// move the cursor.
std::string cut(const std::string& line, std::size_t width) {
  std::string out;
  std::size_t columns = 0;
  for (const char c : line) {
    const bool begins = (static_cast<unsigned char>(c) & 0xC0) != 0x80;
    if (begins && columns++ == width) break;
    const bool controls = static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
    out += controls ? ' ' : c;
  }
  return out;
}

std::string runner_line(const json& runner) {
  const auto silent = runner["silent_s"].is_null()
                          ? std::string("-")
                          : fmt::format("{:.1f} s", runner["silent_s"].get<double>());
  return fmt::format("{:<6} {:<9} {:<9} {:>8} {:>9} {:>8} {:>12}", text_of(runner["rank"]),
                     text_of(runner["state"]), text_of(runner["phase"]), text_of(runner["pid"]),
                     fmt::format("{}/{}", text_of(runner["queued_batches"]), text_of(runner["queue_slots"])),
                     silent, text_of(runner["samples"]));
}

std::string host_text(const json& host) {
  if (host.is_null()) return "none";
  return fmt::format("{} (pid {}), lease {}{}", text_of(host["name"]), text_of(host["pid"]),
                     text_of(host["lease"]), host["leaving"].get<bool>() ? ", leaving" : "");
}

}  // namespace

std::string sparkline(const std::vector<double>& values) {
  double least = INFINITY, most = -INFINITY;
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    least = std::min(least, value);
    most = std::max(most, value);
  }
  std::string text;
  for (const double value : values) {
    const double height = most > least ? (value - least) / (most - least) : 0;
    text += std::isfinite(value) ? bars[static_cast<int>(std::lround(height * 7))] : " ";
  }
  return text;
}

void TopView::take(const json& status, const json& steps) {
  state_ = fmt::format("model '{}' on data '{}', run {}, up {:.0f} s: {}", text_of(status["model"]),
                       text_of(status["data"]), text_of(status["run_id"]), status["uptime_s"].get<double>(),
                       status["ready"].get<bool>() ? "ready" : text_of(status["why_not_ready"]));
  host_ = host_text(status["host"]);
  counts_ = fmt::format("{} of {} attempts, {} samples, {} processes lost, {} replaced",
                        text_of(status["steps"]), text_of(status["attempts"]), text_of(status["samples"]),
                        text_of(status["losses"]), text_of(status["replacements"]));
  runners_.clear();
  for (const auto& runner : status["runners"]) runners_.push_back(runner_line(runner));
  for (const auto& step : steps["steps"]) {
    if (!step["counted"].get<bool>()) continue;
    steps_.push_back({step["time_s"].get<double>(), step["loss"].is_null() ? NAN : step["loss"].get<double>(),
                      step["samples"].get<double>(), step["compute_ms"].get<double>(),
                      step["reduce_ms"].get<double>(), step["wait_ms"].get<double>()});
    if (steps_.size() > most_steps) steps_.pop_front();
  }
  since_ = steps["next"].get<std::uint64_t>();
}

namespace {

/// Three digits, or all of a large number: no exponent.
std::string rate(double per_second) {
  return per_second < 100 ? fmt::format("{:.3g}", per_second) : fmt::format("{:.0f}", per_second);
}

}  // namespace

std::string TopView::speed() const {
  if (steps_.size() < 2) return "-";
  const double seconds = steps_.back().time_s - steps_.front().time_s;
  double samples = 0;
  for (std::size_t i = 1; i < steps_.size(); ++i) samples += steps_[i].samples;
  if (!(seconds > 0)) return "-";
  return fmt::format("{} steps/s, {} samples/s over the last {} steps",
                     rate(double(steps_.size() - 1) / seconds), rate(samples / seconds), steps_.size());
}

std::string TopView::losses(std::size_t width) const {
  if (steps_.empty()) return "-";
  std::vector<double> last;
  const auto shown = std::min(steps_.size(), width - std::min(width, narrowest / 2));
  for (auto i = steps_.size() - shown; i < steps_.size(); ++i) last.push_back(steps_[i].loss);
  return fmt::format("{:<9.5g} {}", steps_.back().loss, sparkline(last));
}

std::string TopView::times() const {
  double compute = 0, reduce = 0, wait = 0;
  for (const auto& step : steps_) {
    compute += step.compute_ms;
    reduce += step.reduce_ms;
    wait += step.wait_ms;
  }
  const double all = compute + reduce + wait;
  if (!(all > 0)) return "-";
  return fmt::format("{:.2f} ms a step: {:.0f}% compute, {:.0f}% reduce, {:.0f}% wait",
                     all / double(steps_.size()), 100 * compute / all, 100 * reduce / all, 100 * wait / all);
}

std::vector<std::string> TopView::lines(std::size_t width) const {
  width = std::max(width, narrowest);
  std::vector<std::string> lines{"accelmgr  " + state_,
                                 "host      " + host_,
                                 "steps     " + counts_,
                                 "speed     " + speed(),
                                 "time      " + times(),
                                 "loss      " + losses(width),
                                 "",
                                 fmt::format("{:<6} {:<9} {:<9} {:>8} {:>9} {:>8} {:>12}", "runner", "state",
                                             "phase", "pid", "queue", "silent", "samples")};
  lines.insert(lines.end(), runners_.begin(), runners_.end());
  for (auto& line : lines) line = cut(line, width);
  return lines;
}

}  // namespace accelmgr::program
