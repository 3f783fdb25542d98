// What people and machines that watch a service see of its steps and its processes. watch_cli_test.py reads
// its metrics with the official client of Prometheus.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/interruption.hpp"
#include "service_run.hpp"

namespace accelmgr::test {
namespace {

using nlohmann::json;

/// A client that reads the events of a service on a thread.
class Subscriber {
 public:
  struct Event {
    std::string id, name;
    json data;
  };
  explicit Subscriber(const ServiceRun& service, const std::string& query = "", const std::string& head = "")
      : thread_([this, path = service.socket(), target = "/v1/events" + query, head] {
          read(path, target, head);
        }) {}
  ~Subscriber() { leaves_ = true; }

  /// The next event.
  Event next() {
    std::unique_lock lock(mutex_);
    const bool came =
        changed_.wait_for(lock, std::chrono::seconds(60), [this] { return !events_.empty() || ended_; });
    EXPECT_TRUE(came && !events_.empty()) << "no event";
    if (events_.empty()) return {};
    auto event = std::move(events_.front());
    events_.pop_front();
    return event;
  }
  /// The next event, which must have that name.
  json next(const std::string& name) {
    auto event = next();
    EXPECT_EQ(event.name, name) << event.data;
    return event.data;
  }
  bool has_ended() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), [this] { return ended_; });
  }

 private:
  void read(const std::string& path, const std::string& target, const std::string& head) {
    std::string text;
    try {
      const std::function<bool()> leaves = [this] { return leaves_.load(); };
      const base::InterruptionScope scope(leaves);
      client::ServiceSocket::connect(path, soon()).follow(target, head, soon(), [&](std::string_view part) {
        text += part;
        for (auto end = text.find("\n\n"); end != std::string::npos; end = text.find("\n\n")) {
          take(text.substr(0, end));
          text.erase(0, end + 2);
        }
      });
    } catch (const SessionError&) {  // This client leaves.
    }
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }
  void take(const std::string& lines) {
    if (lines.starts_with(':')) return;  // A comment.
    const auto field = [&](const std::string& name) {
      const auto at = lines.find(name + ": ") + name.size() + 2;
      return lines.substr(at, lines.find('\n', at) - at);
    };
    const std::lock_guard lock(mutex_);
    events_.push_back({field("id"), field("event"), json::parse(field("data"))});
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Event> events_;
  bool ended_ = false;
  std::atomic<bool> leaves_ = false;
  std::jthread thread_;
};

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
  for (const auto* field : {"step_ms", "compute_ms", "reduce_ms", "wait_ms", "data_ms"})
    EXPECT_NEAR(found["steps"][0][field].get<double>(), made[0][field].get<double>(), 1e-5) << field;
  EXPECT_EQ(found["steps"][3]["status"], "nonfinite");
  EXPECT_EQ(found["steps"][3]["counted"], false);
  EXPECT_EQ(found["steps"][3]["step"], 3);
}

bool both_wait_for_data(const ServiceRun& service) {
  const auto runners = service.status()["runners"];
  return std::ranges::all_of(runners, [](const json& runner) { return runner["phase"] == "data"; });
}

TEST(Watch, HowLongRunnersWaitForDataIsThere) {
  Stage stage;
  stage.withhold_elements_from(2 * staged_batch_size * staged_ranks);
  const ServiceRun service(restarting(stage));
  EXPECT_EQ(service.ask("POST", "/v1/step", R"({"count": 2})").status, 200);
  stage.wait_until_withheld();
  auto step = std::async(std::launch::async, [&] { return service.ask("POST", "/v1/step"); });
  const auto deadline = base::Deadline::in_seconds(60);
  while (!both_wait_for_data(service)) ASSERT_FALSE(deadline.passed());
  const auto seen_ns = base::now_ns();
  EXPECT_TRUE(both_wait_for_data(service));
  const auto waited_ms = double(base::now_ns() - seen_ns) / 1e6;
  stage.release_elements();
  const auto made = step.get().body["steps"][0];
  EXPECT_GE(made["data_ms"].get<double>(), waited_ms);
  EXPECT_GE(made["wait_ms"].get<double>(), waited_ms);
  EXPECT_LT(made["data_ms"].get<double>(), made["step_ms"].get<double>());
}

TEST(Watch, APollerGetsWhatIsNew) {
  const ServiceRun service;
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

TEST(Watch, AHostThatIsKilledLeavesItsStepsAndTheNextOneGoesOn) {
  const ServiceRun service;
  Subscriber subscriber(service);
  EXPECT_EQ(subscriber.next("host"), json::parse(R"({"host": null})"));
  AttachedHost host(service, {"step", "step"});
  for (const auto* expected : {"", "ok", "ok"}) EXPECT_EQ(host.line(), expected);
  const auto attached = subscriber.next("host")["host"];
  EXPECT_EQ(attached["pid"], host.pid());
  EXPECT_EQ(attached["name"], "testhost");
  host.kill_and_wait();
  for (const int number : {1, 2}) EXPECT_EQ(subscriber.next("step")["number"], number);
  EXPECT_EQ(subscriber.next("host"), json::parse(R"({"host": null})"));
  EXPECT_EQ(numbers_of(steps(service)), (std::vector{1, 2}));
  auto manager = service.attach();
  EXPECT_EQ(subscriber.next("host")["host"]["name"], "test");
  expect_ok(manager);
  EXPECT_EQ(subscriber.next("step")["number"], 3);
  EXPECT_EQ(steps(service, "?since=2")["steps"][0]["step"], 3);
}

TEST(Watch, TheLastStepOfAServiceIsAnEvent) {
  Stage stage;
  ServiceRun service(restarting(stage));
  Subscriber subscriber(service);
  subscriber.next("host");
  stage.tell(1, Act::block);
  AttachedHost host(service, {"step", "detach"});
  EXPECT_EQ(host.line(), "");
  subscriber.next("host");
  stage.wait_until_blocked(1);
  ipc::send_signal(service.pidfd(), SIGTERM);
  subscriber.next("closing");
  stage.tell(1, Act::compute);
  EXPECT_EQ(host.line(), "ok");
  EXPECT_EQ(host.line(), "detach");
  EXPECT_EQ(service.wait(), 0);
  EXPECT_EQ(subscriber.next("step")["number"], 1);
}

TEST(Watch, AClientThatConnectsAgainMissesNothing) {
  const ServiceRun service;
  std::string id;
  {
    Subscriber subscriber(service);
    subscriber.next("host");
    EXPECT_EQ(service.ask("POST", "/v1/step", R"({"count": 2})").status, 200);
    subscriber.next("step");
    id = subscriber.next().id;
    EXPECT_EQ(id, "2.0");
  }
  ipc::send_signal(service.runner(0), SIGKILL);
  while (service.status()["replacements"] != 1) std::this_thread::yield();
  EXPECT_EQ(service.ask("POST", "/v1/step").status, 200);
  for (const auto& [query, head] : {std::pair<std::string, std::string>{"?since=" + id, ""},
                                    {"?since=0", "Last-Event-ID: " + id + "\r\n"}}) {
    Subscriber again(service, query, head);
    again.next("host");
    EXPECT_EQ(again.next("incident")["number"], 1);
    const auto step = again.next();
    EXPECT_EQ(step.data["number"], 3);
    EXPECT_EQ(step.id, "3.1");
  }
  // A number alone is that of a step: the incidents until now are known.
  Subscriber from_step(service, "?since=1");
  from_step.next("host");
  for (const int number : {2, 3}) EXPECT_EQ(from_step.next("step")["number"], number);
}

TEST(Watch, SoManyClientsMayWatchAndNoMore) {
  const ServiceRun service;
  std::deque<Subscriber> subscribers;
  for (int i = 0; i < 100; ++i) subscribers.emplace_back(service).next("host");
  const auto answer = service.ask("GET", "/v1/events");
  EXPECT_EQ(answer.status, 503);
  EXPECT_EQ(answer.code(), "too_many_subscribers");
  EXPECT_EQ(service.ask("POST", "/v1/step").status, 200);
  for (auto& subscriber : subscribers) EXPECT_EQ(subscriber.next("step")["number"], 1);
}

TEST(Watch, AClientThatLeavesDuringAStepDisturbsNothing) {
  Stage stage;
  const ServiceRun service(restarting(stage));
  stage.tell(1, Act::block);
  std::atomic<bool> leaves = false;
  std::jthread client([&] {
    const std::function<bool()> asked = [&] { return leaves.load(); };
    const base::InterruptionScope scope(asked);
    EXPECT_THROW(
        client::ServiceSocket::connect(service.socket(), soon()).ask("POST", "/v1/step", "", "", soon()),
        SessionError);
  });
  stage.wait_until_blocked(1);
  leaves = true;
  client.join();
  stage.tell(1, Act::compute);
  while (service.status()["steps"] != 1) std::this_thread::yield();
  while (service.ask("POST", "/v1/step").status != 200) std::this_thread::yield();
  EXPECT_EQ(numbers_of(steps(service)), (std::vector{1, 2}));
}

}  // namespace
}  // namespace accelmgr::test
