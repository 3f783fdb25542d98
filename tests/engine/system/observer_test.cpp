// Checks that processes which observe a service see what happens there, and change nothing.
#include "engine/client/observer.hpp"
#include "engine/protocol/messages.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <future>
#include <iterator>
#include <thread>

#include "service_run.hpp"

namespace accelmgr::test {
namespace {

using client::Observer;
using testing::HasSubstr;

Observer observer_of(const ServiceRun& service) { return Observer::attach(service.socket(), 30); }

/// The values of all parameters, without the gaps between tensors.
std::vector<float> values_of(const Observer& observer, const client::ParameterValues& copy) {
  std::vector<float> values;
  for (const auto& entry : observer.manifest().tensors) {
    const auto* first = reinterpret_cast<const float*>(copy.values.get() + entry.offset);
    values.insert(values.end(), first, first + entry.count);
  }
  return values;
}

/// Writes `value` into all parameters, as an optimizer does that steps in place.
void fill(const client::Handle& manager, float value) {
  for (const auto& entry : manager.manifest().tensors)
    std::fill_n(reinterpret_cast<float*>(manager.view().parameters() + entry.offset), entry.count, value);
}

TEST(Observer, WaitsForTheNextStep) {
  Stage stage;
  const ServiceRun service(restarting(stage));
  auto observer = observer_of(service);
  auto manager = service.attach();
  stage.tell(0, Act::block);
  auto result = std::async(std::launch::async, [&] { return manager.step(); });
  stage.wait_until_blocked(0);
  EXPECT_FALSE(observer.next_step(0.05));
  auto seen = std::async(std::launch::async, [&] { return observer.next_step(60); });
  stage.tell(0, Act::compute);
  const auto found = seen.get();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->attempt, result.get().attempt);
}

TEST(Observer, ThatFallsBehindGoesOnWithTheOldestStepThatIsThere) {
  const ServiceRun service;
  auto observer = observer_of(service);
  EXPECT_EQ(service.ask("POST", "/v1/step", R"({"count": 300})").status, 200);
  const auto seen = observer.next_step(30);
  ASSERT_TRUE(seen);
  EXPECT_EQ(seen->step, 300 - session::max_step_records + 1);
}

TEST(Observer, GetsMemoryThatTheKernelRefusesToMapWritable) {
  const ServiceRun service;
  auto socket = client::ServiceSocket::connect(service.socket(), soon());
  const auto head =
      fmt::format("Upgrade: accelmgr-observer\r\nAccelmgr-Build: {:016x}\r\n", protocol::build_fingerprint());
  const auto answer = socket.ask("GET", "/v1/observe", head, "", soon());
  ASSERT_EQ(answer.status, 101);
  ASSERT_TRUE(answer.fd);
  constexpr std::size_t page = 4096;
  EXPECT_EQ(mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, answer.fd.get(), 0), MAP_FAILED);
  EXPECT_EQ(errno, EACCES);
  auto* const map = mmap(nullptr, page, PROT_READ, MAP_SHARED, answer.fd.get(), 0);
  ASSERT_NE(map, MAP_FAILED);
  EXPECT_EQ(mprotect(map, page, PROT_READ | PROT_WRITE), -1);
  EXPECT_EQ(errno, EACCES);
  munmap(map, page);
}

/// Whether the host writes inside writing().
class WrittenParameters : public testing::TestWithParam<bool> {};

TEST_P(WrittenParameters, AreNeverCopiedHalfWritten) {
  const ServiceRun service([](Config& config) { config.model.options["hidden"] = "10000"; });
  auto manager = service.attach();
  std::atomic<int> versions = 0;
  // Many times between two steps, so that most copies meet a write if they are not kept from it.
  const auto write = [&](int number) {
    if (GetParam()) manager.begin_writing();
    for (int i = 0; i < 50; ++i) fill(manager, float((number + i) % 1000) / 1e6f);
    if (GetParam()) manager.end_writing();
  };
  write(0);
  expect_ok(manager);
  std::jthread host([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      write(++versions);
      expect_ok(manager);
    }
  });
  const auto observer = observer_of(service);
  std::uint64_t version = 0;
  for (int i = 0; i < 100; ++i) {
    const auto copy = observer.parameters(60);
    const auto values = values_of(observer, copy);
    EXPECT_EQ(std::ranges::count(values, values.front()), std::ssize(values)) << "copy " << i;
    EXPECT_EQ(copy.version % 2, 0u);
    EXPECT_GE(copy.version, version);
    version = copy.version;
  }
  host.request_stop();
  host.join();
  EXPECT_GT(versions, 0);
}

INSTANTIATE_TEST_SUITE_P(Observer, WrittenParameters, testing::Bool(),
                         [](const auto& tested) { return tested.param ? "Announced" : "Unannounced"; });

TEST(Observer, CopiesNoParametersWhileAHostMayBeWriting) {
  Stage stage;
  const ServiceRun service(restarting(stage));
  const auto observer = observer_of(service);
  const auto first = observer.parameters(60);
  auto manager = service.attach();
  EXPECT_THAT(message_of<SessionError>([&] { observer.parameters(0.05); }), HasSubstr("between its steps"));
  manager.begin_writing();
  EXPECT_THAT(message_of<SessionError>([&] { observer.parameters(0.05); }), HasSubstr("a host writes them"));
  fill(manager, 0.25f);
  manager.end_writing();
  stage.tell(0, Act::block);
  auto result = std::async(std::launch::async, [&] { return manager.step(); });
  stage.wait_until_blocked(0);
  const auto during = observer.parameters(60);
  EXPECT_THAT(values_of(observer, during), testing::Each(0.25f));
  EXPECT_GT(during.version, first.version);
  EXPECT_EQ(during.step, 0u);
  stage.tell(0, Act::compute);
  EXPECT_TRUE(result.get());
  fill(manager, 0.5f);
  manager.stop();
  const auto after = observer.parameters(60);
  EXPECT_THAT(values_of(observer, after), testing::Each(0.5f));
  EXPECT_GT(after.version, during.version) << "the host did not say that it wrote";
  EXPECT_EQ(after.step, 1u);
  service.wait_until_alone();
  EXPECT_EQ(service.ask("POST", "/v1/step").status, 200);
  const auto later = observer.parameters(60);
  EXPECT_EQ(later.version, after.version) << "steps of the service itself make no version";
  EXPECT_EQ(later.step, 2u);
}

TEST(Observer, ThatIsStoppedOrKilledChangesNothing) {
  const auto expected = undisturbed(3);
  const ServiceRun service;
  RoleProcess stopped(observes, {service.socket()}), killed(observes, {service.socket()});
  EXPECT_EQ(stopped.line(), "observes");
  EXPECT_EQ(killed.line(), "observes");
  {
    auto manager = service.attach();
    expect_ok(manager);
    ipc::send_signal(stopped.pidfd(), SIGSTOP);
    while (ipc::usage(stopped.pid()).value().state != 'T') std::this_thread::yield();
    expect_ok(manager);
    killed.kill_and_wait();
    expect_ok(manager);
    EXPECT_TRUE(same_bits(gradients_of(manager), expected.gradients));
    EXPECT_TRUE(same_bits(buffers_of(manager), expected.buffers));
  }
  service.wait_until_alone();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(service.ask("POST", "/v1/step", R"({"count": 100})").status, 200);
  EXPECT_EQ(service.status()["losses"], 0);
  EXPECT_EQ(service.status()["steps"], 1003);
  stopped.kill_and_wait();
}

TEST(Observer, LearnsThatTheServiceHasEnded) {
  ServiceRun service;
  auto observer = observer_of(service), waiting = observer_of(service);
  EXPECT_EQ(service.ask("POST", "/v1/step").status, 200);
  EXPECT_TRUE(waiting.next_step(30));
  auto end = std::async(std::launch::async,
                        [&] { return message_of<SessionError>([&] { waiting.next_step(60); }); });
  EXPECT_FALSE(observer.has_ended());
  EXPECT_EQ(service.terminate(), 0);
  EXPECT_THAT(end.get(), HasSubstr("the service has ended"));
  EXPECT_TRUE(observer.has_ended());
  EXPECT_EQ(observer.next_step(0).value().step, 1u) << "what was recorded before is there";
  EXPECT_THROW(observer.next_step(60), SessionError);
  EXPECT_THAT(message_of<SessionError>([&] { observer.parameters(60); }), HasSubstr("the service has ended"));
  EXPECT_EQ(observer.statistics().steps, 1u);
  EXPECT_THAT(message_of<SessionError>([&] { observer_of(service); }),
              HasSubstr("no service can be reached"));
}

TEST(Observer, LeavesNothingInTheService) {
  const ServiceRun service;
  const auto descriptors = [&] {
    const std::filesystem::directory_iterator open(fmt::format("/proc/{}/fd", service.pid()));
    return std::distance(begin(open), end(open));
  };
  std::vector<Observer> observers;
  observers.push_back(observer_of(service));
  const auto before = service.ask("GET", "/healthz").status == 200 ? descriptors() : 0;
  // More than it takes connections.
  for (int i = 0; i < 200; ++i) observers.push_back(observer_of(service));
  const auto deadline = soon();
  while (descriptors() > before && !deadline.passed()) std::this_thread::yield();
  EXPECT_LE(descriptors(), before);
  EXPECT_TRUE(service.status()["host"].is_null());
  auto manager = service.attach();
  expect_ok(manager);
  EXPECT_TRUE(observers.back().next_step(30));
}

}  // namespace
}  // namespace accelmgr::test
