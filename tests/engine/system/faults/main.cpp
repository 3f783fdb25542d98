// Runs the tests. With --measure it runs every case alone, for tools/bench/run.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "case_run.hpp"
#include "role_process.hpp"

namespace accelmgr::test {
namespace {

nlohmann::json line_of(const FaultCase& c, const CaseSeen& seen) {
  return {{"case", policy_name(c.policy)},   {"metric", "report"},
          {"value", seen.report_ms},         {"unit", "ms"},
          {"place", c.place.name},           {"fault", c.fault},
          {"status", seen.disturbed.status}, {"counted", seen.disturbed.counted},
          {"tries", seen.disturbed.tries}};
}

int measure(const Arguments&) {
  bool complete = true;
  for (const auto& place : places()) {
    for (const auto& c : cases_at(place)) {
      const auto seen = run_cases({c}, 1).front();
      if (seen)
        std::printf("%s\n", line_of(c, *seen).dump().c_str());
      else
        std::fprintf(stderr, "%s has failed\n", name_of(c).c_str());
      complete = complete && seen;
    }
  }
  return complete ? 0 : 1;
}

}  // namespace
}  // namespace accelmgr::test

int main(int argc, char** argv) {
  using namespace accelmgr::test;
  return run_tests(argc, argv, {{"--measure", measure}});
}
