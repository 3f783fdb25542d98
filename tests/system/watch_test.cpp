// What people and machines that watch a service see of its steps and its processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "service_run.hpp"

namespace accelmgr::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json steps(const ServiceRun& service, const std::string& query = "") {
  return service.ask("GET", "/v1/steps" + query).body;
}

std::vector<int> numbers_of(const json& answer) {
  std::vector<int> numbers;
  for (const auto& step : answer["steps"]) numbers.push_back(step["number"].get<int>());
  return numbers;
}

TEST(Watch, TheLastStepsAreThere) {
  Stage stage;
  const ServiceRun service(restarting(stage));
  EXPECT_EQ(steps(service), json::parse(R"({"steps": [], "first": 1, "next": 0})"));
  const auto made = service.ask("POST", "/v1/step", R"({"count": 3})").body["steps"];
  stage.tell(1, Act::infinite_loss);
  EXPECT_EQ(service.ask("POST", "/v1/step").code(), "nonfinite");
  const auto found = steps(service);
  EXPECT_EQ(numbers_of(found), (std::vector{1, 2, 3, 4}));
  EXPECT_EQ(found["first"], 1);
  EXPECT_EQ(found["next"], 4);
  for (std::size_t i = 0; i < 3; ++i)
    for (const auto* field :
         {"step", "attempt", "status", "counted", "loss", "samples", "participants", "tries"})
      EXPECT_EQ(found["steps"][i][field], made[i][field]) << field;
  for (const auto* field : {"step_ms", "compute_ms", "reduce_ms", "wait_ms"})
    EXPECT_NEAR(found["steps"][0][field].get<double>(), made[0][field].get<double>(), 1e-5) << field;
  EXPECT_EQ(found["steps"][3]["status"], "nonfinite");
  EXPECT_EQ(found["steps"][3]["counted"], false);
  EXPECT_EQ(found["steps"][3]["step"], 3);
}

TEST(Watch, APollerGetsWhatIsNew) {
  const Stage stage;
  const ServiceRun service(restarting(stage));
  EXPECT_EQ(service.ask("POST", "/v1/step", R"({"count": 5})").status, 200);
  EXPECT_EQ(numbers_of(steps(service, "?since=3")), (std::vector{4, 5}));
  const auto first = steps(service, "?since=1&limit=2");
  EXPECT_EQ(numbers_of(first), (std::vector{2, 3}));
  EXPECT_EQ(first["next"], 3);
  const auto none = steps(service, "?since=5");
  EXPECT_EQ(numbers_of(none), std::vector<int>());
  EXPECT_EQ(none["next"], 5);
  // A number of an earlier service.
  EXPECT_EQ(numbers_of(steps(service, "?since=9")), (std::vector{1, 2, 3, 4, 5}));
  EXPECT_EQ(service.ask("POST", "/v1/step", R"({"count": 300})").status, 200);
  const auto late = steps(service, "?since=5");
  EXPECT_EQ(late["first"], 50);
  EXPECT_EQ(late["steps"].size(), 256u);
  EXPECT_EQ(late["next"], 305);
}

TEST(Watch, WrongParametersAreRefusedWithWhatIsRight) {
  const Stage stage;
  const ServiceRun service(restarting(stage));
  for (const auto* query : {"?since=-1", "?since=x", "?since", "?limit=0", "?limit=257", "?last=1"}) {
    const auto answer = service.ask("GET", std::string("/v1/steps") + query);
    EXPECT_EQ(answer.status, 400) << query;
    EXPECT_EQ(answer.code(), "bad_request") << query;
  }
  EXPECT_EQ(service.ask("GET", "/v1/steps?limit=257").body["error"]["message"],
            "limit is '257'; it must be a whole number from 1 to 256");
}

TEST(Watch, MetricsAreThoseOfTheSession) {
  const Stage stage;
  const ServiceRun service(restarting(stage));
  auto manager = service.attach();
  for (int i = 0; i < 2; ++i) expect_ok(manager);
  auto connection = client::ServiceSocket::connect(service.socket(), soon());
  const auto text = connection.ask("GET", "/metrics", "", "", soon()).body;
  for (const auto* line : {"accelmgr_host_attached 1\n", "accelmgr_steps_total{status=\"ok\"} 2\n",
                           "accelmgr_step_duration_seconds_count 2\n", "accelmgr_committed_steps_total 2\n",
                           "accelmgr_runner_ready{rank=\"1\"} 1\n", "accelmgr_incidents_total 0\n"})
    EXPECT_THAT(text, HasSubstr(line));
}

}  // namespace
}  // namespace accelmgr::test
