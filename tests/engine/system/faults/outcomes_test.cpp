// Checks that every fault at every phase has the outcome in outcomes.md, within its deadline, and leaves
// nothing behind.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <set>

#include "case_run.hpp"
#include "places.hpp"

namespace accelmgr::test {
namespace {

// More cases than cores, because many of them wait for a deadline. With still more, a runner that waits for
// the CPU would look like one that hangs.
constexpr int at_once = 4;

/// The rows of the table that are cases, with place, fault and policy as the key.
std::map<std::string, std::string> expected_rows() {
  std::ifstream file(in_checkout("tests/engine/system/faults/outcomes.md"));
  std::map<std::string, std::string> rows;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("| ") || line.starts_with("| phase ")) continue;
    std::size_t end = 0;
    for (int column = 0; column < 3; ++column) end = line.find(" | ", end) + 3;
    EXPECT_TRUE(rows.emplace(line.substr(0, end), line).second) << "twice: " << line;
  }
  return rows;
}

std::string key_of(const FaultCase& c) {
  return "| " + c.place.name + " | " + c.fault + " | " + policy_name(c.policy) + " | ";
}

TEST(FaultOutcomes, AreThoseOfEveryPhase) {
  std::set<base::FaultPhase> covered;
  for (const auto& place : places()) covered.insert(place.phase);
  for (const auto phase : faults::phases) EXPECT_TRUE(covered.contains(phase)) << faults::name_of(phase);
}

TEST(FaultOutcomes, AreExpectedForEveryCaseAndNoOther) {
  auto rows = expected_rows();
  for (const auto& place : places())
    for (const auto& c : cases_at(place)) EXPECT_EQ(rows.erase(key_of(c)), 1U) << name_of(c);
  for (const auto& [key, row] : rows) ADD_FAILURE() << "no such case: " << row;
}

/// `like` is the same model in the host's memory, with the same dtypes: its bits are the same.
void expect_outcomes_of_the_table(const Place& place, const char* model, const char* like) {
  const auto expected = expected_rows();
  auto cases = cases_at(place);
  // What a device does to a runner shows under one policy. The other is the supervisor's alone.
  if (model != like) std::erase_if(cases, [](const FaultCase& c) { return c.policy == LossPolicy::fail; });
  for (auto& c : cases) c.model = model;
  cases.push_back(undisturbed(place));
  cases.back().model = like;
  const auto seen = run_cases(cases, at_once);
  ASSERT_TRUE(seen.back()) << "the undisturbed run";
  const auto& states = seen.back()->states;
  for (std::size_t i = 0; i + 1 < cases.size(); ++i) {
    SCOPED_TRACE(name_of(cases[i]));
    if (!seen[i]) {
      ADD_FAILURE() << "the case itself has failed, see above";
      continue;
    }
    const auto row = expected.find(key_of(cases[i]));
    EXPECT_EQ(row_of(cases[i], *seen[i]), row == expected.end() ? "" : row->second);
    if (seen[i]->next.status.empty()) continue;  // The system never started.
    std::size_t counted = 0;
    EXPECT_EQ(seen[i]->states[0], states[counted]);
    counted += seen[i]->disturbed.counted ? 1 : 0;
    EXPECT_EQ(seen[i]->states[1], states[counted])
        << "gradients, buffers or counters are not those of " << counted + 1 << " undisturbed steps";
    counted += seen[i]->next.counted ? 1 : 0;
    EXPECT_EQ(seen[i]->states[2], states[counted])
        << "gradients, buffers or counters are not those of " << counted + 1 << " undisturbed steps";
  }
}

class FaultOutcome : public testing::TestWithParam<Place> {};

TEST_P(FaultOutcome, IsWhatTheTableSays) {
  expect_outcomes_of_the_table(GetParam(), mixed_dtypes, mixed_dtypes);
}

class DeviceFaultOutcome : public testing::TestWithParam<Place> {};

TEST_P(DeviceFaultOutcome, IsWhatTheTableSays) {
  expect_outcomes_of_the_table(GetParam(), mixed_dtypes_on_fake_device, mixed_dtypes);
}

std::vector<Place> places_of_runners() {
  auto all = places();
  std::erase_if(all, [](const Place& place) { return place.rank == faults::manager_rank; });
  return all;
}

INSTANTIATE_TEST_SUITE_P(At, DeviceFaultOutcome, testing::ValuesIn(places_of_runners()),
                         [](const auto& place) { return place.param.name; });
INSTANTIATE_TEST_SUITE_P(At, FaultOutcome, testing::ValuesIn(places()),
                         [](const auto& place) { return place.param.name; });

}  // namespace
}  // namespace accelmgr::test
