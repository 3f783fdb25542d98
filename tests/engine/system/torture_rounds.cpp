#include "torture_rounds.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/clock.hpp"
#include "service_torture.hpp"
#include "torture.hpp"

namespace accelmgr::test {
namespace {

nlohmann::json own_fields(const TortureReport& report) {
  return {{"recoveries", report.recoveries}, {"failed_recoveries", report.failed_recoveries}};
}

nlohmann::json own_fields(const ServiceTortureReport& report) {
  return {{"steps_made", report.steps_made},
          {"services", report.services},
          {"checkpoints", report.checkpoints},
          {"hosts", report.hosts},
          {"users", report.users},
          {"leases", report.leases},
          {"ends", report.ends},
          {"found", report.found}};
}

template <class Report>
nlohmann::json as_json(std::uint64_t seed, const Report& report) {
  nlohmann::json all{{"seed", seed},
                     {"steps", report.steps},
                     {"killed", report.killed},
                     {"injected", report.injected},
                     {"kills", report.kills()},
                     {"losses", report.losses},
                     {"undisturbed_s", report.undisturbed_s},
                     {"disturbed_s", report.disturbed_s},
                     {"failure", report.failure}};
  all.update(own_fields(report));
  return all;
}

/// `round` makes one with a seed and a log, and returns its report.
template <typename Round>
int in_rounds(const std::vector<std::string>& arguments, const char* log, Round&& round) {
  const auto end = base::Deadline::in_seconds(60 * std::stod(arguments.at(0)));
  bool failed = false;
  for (auto seed = std::stoull(arguments.at(1));; ++seed) {
    const auto report = round(seed, fmt::format("{}/{}-{}.log", arguments.at(2), log, seed));
    fmt::print("{}\n", as_json(seed, report).dump());
    std::fflush(stdout);
    failed = failed || !report.failure.empty();
    if (end.passed()) return failed ? 1 : 0;
  }
}

}  // namespace

int torture_in_rounds(const std::vector<std::string>& arguments) {
  return in_rounds(arguments, "torture", [](std::uint64_t seed, const std::string& log) {
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
    options.log_file = log;
    return torture(options);
  });
}

int service_torture_in_rounds(const std::vector<std::string>& arguments) {
  return in_rounds(arguments, "service_torture", [](std::uint64_t seed, const std::string& log) {
    ServiceTortureOptions options;
    options.seed = seed;
    if (seed % 2 != 0) options.longest_life_s = 10;
    options.log_file = log;
    return service_torture(options);
  });
}

}  // namespace accelmgr::test
