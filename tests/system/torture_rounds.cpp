#include "torture_rounds.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/clock.hpp"
#include "torture.hpp"

namespace accelmgr::test {
namespace {

nlohmann::json as_json(std::uint64_t seed, const TortureReport& report) {
  return {{"seed", seed},
          {"steps", report.steps},
          {"killed", report.killed},
          {"injected", report.injected},
          {"kills", report.kills()},
          {"losses", report.losses},
          {"recoveries", report.recoveries},
          {"failed_recoveries", report.failed_recoveries},
          {"undisturbed_s", report.undisturbed_s},
          {"disturbed_s", report.disturbed_s},
          {"failure", report.failure}};
}

}  // namespace

int torture_in_rounds(const std::vector<std::string>& arguments) {
  const auto end = base::Deadline::in_seconds(60 * std::stod(arguments.at(0)));
  bool failed = false;
  for (auto seed = std::stoull(arguments.at(1));; ++seed) {
    TortureOptions options;
    options.seed = seed;
    options.injected = 200;
    options.killer = {.most = 200,
                      .runners = 0.4,
                      .fork_servers = 0.25,
                      .managers = 0.35,
                      .stops = 0.15,
                      .longest_stop_s = 2.5,
                      .longest_pause_s = 0.8};
    options.log_file = fmt::format("{}/torture-{}.log", arguments.at(2), seed);
    const auto report = torture(options);
    fmt::print("{}\n", as_json(seed, report).dump());
    std::fflush(stdout);
    failed = failed || !report.failure.empty();
    if (end.passed()) return failed ? 1 : 0;
  }
}

}  // namespace accelmgr::test
