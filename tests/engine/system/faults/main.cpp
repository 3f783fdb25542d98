// Runs the tests. With --measure it runs every case alone, for tools/bench/run.
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string_view>

#include "accelmgr/init.hpp"
#include "case_run.hpp"

namespace accelmgr::test {
namespace {

nlohmann::json line_of(const FaultCase& c, const CaseSeen& seen) {
  return {{"case", policy_name(c.policy)},   {"metric", "report"},
          {"value", seen.report_ms},         {"unit", "ms"},
          {"place", c.place.name},           {"fault", c.fault},
          {"status", seen.disturbed.status}, {"counted", seen.disturbed.counted},
          {"tries", seen.disturbed.tries}};
}

int measure() {
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
  accelmgr::init(argc, argv);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become children of this process, where tests see them.
  if (argc == 2 && std::string_view(argv[1]) == "--measure") return accelmgr::test::measure();
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
