// The view of `accelmgr top`: what a service does, as the lines of a terminal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace accelmgr::program {

/// Bars of eight heights, one for each value, from the smallest to the largest of them; a space for a NaN.
std::string sparkline(const std::vector<double>& values);

class TopView {
 public:
  /// Takes the answers to GET /v1/status and to GET /v1/steps?since=since().
  void take(const nlohmann::json& status, const nlohmann::json& steps);
  /// The `since` of the next request for steps.
  std::uint64_t since() const noexcept { return since_; }

  /// Lines without line ends, of at most `width` columns, but for a terminal that is narrower than 40.
  std::vector<std::string> lines(std::size_t width) const;

 private:
  struct Step {
    double time_s, loss, samples, compute_ms, reduce_ms, wait_ms;
  };
  std::string speed() const;
  std::string losses(std::size_t width) const;
  std::string times() const;

  std::string state_, host_, counts_;
  std::vector<std::string> runners_;
  std::deque<Step> steps_;  ///< The last ones that counted.
  std::uint64_t since_ = 0;
};

}  // namespace accelmgr::program
