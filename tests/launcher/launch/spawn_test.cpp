// Tests of spawn() with every start method: which functions are called, with what, and what comes back.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <thread>

#include "accelmgr/errors.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"
#include "functions.hpp"
#include "launched.hpp"
#include "launcher/launch/run/ports.hpp"

namespace accelmgr::launch::test {
namespace {

class Spawn : public Launched, public testing::WithParamInterface<StartMethod> {};

TEST_P(Spawn, RanksHaveTheirArgumentsEnvironmentAndPlacesAndTheirResultsComeBackByRank) {
  auto chosen = options(3, GetParam());
  chosen.rank_offset = 3;
  chosen.world_size = 6;
  chosen.master_addr = "127.0.0.1";
  chosen.backend = "gloo";
  chosen.environment = {{"OURS", "of the options"}};
  chosen.setup_name = "prepare";
  const std::string large(500'000, 'a');
  const Value args = {0.5, "text", {{"key", {1, 2, 3}}}, Value::binary({0, 255, 7}), large};
  const auto directory = std::filesystem::current_path();
  std::filesystem::current_path("/proc");
  setenv("http_proxy", "http://proxy:1", 1);
  const auto context = spawn("tell", args, chosen);
  unsetenv("http_proxy");
  std::filesystem::current_path(directory);
  ASSERT_EQ(context.results().size(), 3U);
  for (int i = 0; i < 3; ++i) {
    auto told = context.results()[static_cast<std::size_t>(i)];
    EXPECT_TRUE(told.at("args") == args);
    EXPECT_NE(told.at("pid"), getpid());
    told.erase("args");
    EXPECT_EQ(told, (Value{{"rank", 3 + i},
                           {"RANK", std::to_string(3 + i)},
                           {"LOCAL_RANK", std::to_string(i)},
                           {"WORLD_SIZE", "6"},
                           {"OURS", "of the options"},
                           {"PREPARED", "yes"},
                           {"http_proxy", ""},
                           {"directory", "/proc"},
                           {"own group", true},
                           {"pid", context.pids()[static_cast<std::size_t>(i)]}}));
  }
}

TEST_P(Spawn, RanksThatHaveFinishedDoNotWaitForJoin) {
  auto context = spawn("bytes", {500'000}, not_joined(options(3, GetParam())));
  // The ranks end although their results were not collected.
  for (const pid_t pid : context.pids()) {
    const auto deadline = soon();
    while (kill(pid, 0) == 0 && !deadline.passed()) sched_yield();
    EXPECT_FALSE(deadline.passed());
  }
  EXPECT_TRUE(context.join());
  for (const auto& result : context.results()) EXPECT_EQ(result.get<std::string>().size(), 500'000U);
}

TEST_P(Spawn, OneProcessThatIsWaitedForIsThisOne) {
  setenv("http_proxy", "http://proxy:1", 1);
  unsetenv("RANK");
  auto chosen = options(1, GetParam());
  chosen.environment = {{"OURS", "of the options"}};
  const auto context = spawn("tell", {7}, chosen);
  EXPECT_EQ(context.results()[0].at("pid"), getpid());
  EXPECT_EQ(context.results()[0].at("RANK"), "0");
  EXPECT_EQ(context.results()[0].at("OURS"), "of the options");
  EXPECT_EQ(context.results()[0].at("http_proxy"), "");
  EXPECT_STREQ(getenv("http_proxy"), "http://proxy:1");
  EXPECT_EQ(getenv("RANK"), nullptr);
  EXPECT_EQ(getenv("OURS"), nullptr);
  unsetenv("http_proxy");
  EXPECT_THROW(spawn("obey", {"throw"}, chosen), std::runtime_error);
  EXPECT_EQ(getenv("RANK"), nullptr);
}

INSTANTIATE_TEST_SUITE_P(StartMethods, Spawn, every_method, method_name);

class SpawnFork : public Launched {};

class SpawnBesideThreads : public Launched {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__)
    GTEST_SKIP()
        << "the address sanitizer's allocator cannot be used after a fork beside threads that allocate";
#endif
  }
};

class SpawnExecuted : public Launched, public testing::WithParamInterface<StartMethod> {};

TEST_P(SpawnExecuted, LeavesThePortsOfTheCallerToTheCaller) {
  auto bound = bind_port();
  auto context = spawn("obey", {"hang", "hang"}, not_joined(options(2, GetParam())));
  bound.socket.reset();
  EXPECT_EQ(bind_port(bound.port).port, bound.port) << "a process of the launch has a copy of the socket";
  context.terminate();
}

INSTANTIATE_TEST_SUITE_P(StartMethods, SpawnExecuted,
                         testing::Values(StartMethod::spawn, StartMethod::forkserver), method_name);

TEST_F(SpawnFork, CallsWhatWasNeverRegistered) {
  const int captured = 40;
  auto chosen = options(3);
  chosen.setup = [] { setenv("PREPARED", "2", 1); };
  const auto context = spawn(
      [&](int rank, const Value& args) {
        return Value(captured + rank + args.at(0).get<int>() + std::stoi(getenv("PREPARED")));
      },
      {100}, chosen);
  EXPECT_EQ(context.results(), (std::vector<Value>{142, 143, 144}));
}

TEST_F(SpawnFork, AResultBeyondTheBoundIsAFailureOfItsRank) {
  const auto error = failure_of([] { spawn("bytes", {ipc::max_text_bytes + 1}, options(2)); });
  EXPECT_TRUE(says(error.what(), {"67108864"}));
  EXPECT_EQ(error.first().type, "accelmgr::UsageError");
}

TEST_F(SpawnFork, WhatCannotBeCalledIsRefusedBeforeAnythingStarts) {
  const Function callable = [](int, const Value&) { return Value(); };
  auto chosen = options(2);
  chosen.setup_name = "prepar";
  EXPECT_THROW(spawn("tell", {}, chosen), ConfigError);
  EXPECT_TRUE(says(message_of<ConfigError>([&] { spawn("tel", {}, options(2)); }),
                   {"'tel'", "did you mean 'tell'", "registered are: "}));
  chosen.setup_name = "prepare";
  chosen.setup = [] {};
  EXPECT_EQ(message_of<UsageError>([&] { spawn("tell", {}, chosen); }),
            "options.setup and options.setup_name are both set; a process has one setup");
  chosen.setup_name = "";
  for (const auto method : {StartMethod::spawn, StartMethod::forkserver}) {
    chosen.start_method = method;
    EXPECT_TRUE(says(message_of<UsageError>([&] { spawn("tell", {}, chosen); }), {"use setup_name"}));
    EXPECT_TRUE(says(message_of<UsageError>([&] { spawn(callable, {}, options(2, method)); }),
                     {"register_function"}));
    const std::string large(ipc::max_text_bytes, 'a');
    EXPECT_TRUE(
        says(message_of<UsageError>([&] { spawn("tell", {large}, options(2, method)); }), {"67108864"}));
  }
  EXPECT_EQ(message_of<UsageError>([&] { register_function("tell", callable); }),
            "a function is already registered under the name 'tell'");
  EXPECT_EQ(message_of<UsageError>([&] { register_function("", callable); }),
            "the name of a registered function must not be empty");
}

TEST_F(SpawnFork, RanksLogUnderTheirNames) {
  testing::internal::CaptureStderr();
  spawn(
      [](int, const Value&) {
        base::log().warn("hello");
        return Value();
      },
      {}, options(2));
  EXPECT_TRUE(
      says(testing::internal::GetCapturedStderr(), {"[rank 0 step 0] hello\n", "[rank 1 step 0] hello\n"}));
}

TEST_F(SpawnFork, TheResolvedOptionsArePrintedOnce) {
  auto chosen = options(2);
  chosen.print_config = true;
  testing::internal::CaptureStdout();
  spawn("tell", {}, chosen);
  const auto text = testing::internal::GetCapturedStdout();
  for (const std::string line : {"nprocs = 2  (option)\n", "backend = shm  (option)\n"}) {
    const auto at = text.find(line);
    EXPECT_NE(at, std::string::npos) << text;
    EXPECT_EQ(text.find(line, at + 1), std::string::npos) << "twice: " << text;
  }
}

TEST_F(SpawnBesideThreads, ThreadsBesideAForkAreWarnedOf) {
  std::atomic<bool> over{false};
  std::thread waiting([&] { over.wait(false); });
  testing::internal::CaptureStderr();
  spawn("tell", {}, options(2));
  const auto text = testing::internal::GetCapturedStderr();
  over = true;
  over.notify_one();
  waiting.join();
  EXPECT_TRUE(says(text, {"the start method 'fork' copies a process that has other threads ("}));
}

TEST_F(SpawnFork, WorksBesideThreadsAndInOneThatEnds) {
  std::optional<SpawnContext> context;
  const Line line;
  std::thread([&] { context.emplace(spawn(until_told(line), {}, not_joined(options(2)))); }).join();
  // The thread that forked the fork server has ended; the ranks must go on.
  line.hear_pidfds(2);
  EXPECT_FALSE(context->join(0));
  line.order(2);
  EXPECT_TRUE(context->join());
  EXPECT_EQ(context->results(), (std::vector<Value>{0, 1}));
}

TEST_F(SpawnBesideThreads, RanksCanLogThoughAThreadOfTheCallerLogsAsTheyAreForked) {
  std::atomic<bool> over{false};
  const base::UniqueFd null(open("/dev/null", O_WRONLY)), before(dup(STDERR_FILENO));
  dup2(null.get(), STDERR_FILENO);
  std::thread logging([&] {
    while (!over) base::log().error("of the caller");
  });
  for (int i = 0; i < 20; ++i)
    spawn(
        [](int, const Value&) {
          base::log().error("of a rank");
          return Value();
        },
        {}, options(2));
  over = true;
  logging.join();
  dup2(before.get(), STDERR_FILENO);
}

TEST_F(SpawnFork, RanksCanSpawnTheirOwn) {
  const auto context = spawn(
      [](int rank, const Value&) {
        return Value(
            spawn([rank](int inner, const Value&) { return Value(10 * rank + inner); }, {}, options(2))
                .results());
      },
      {}, options(2));
  EXPECT_EQ(context.results(), (std::vector<Value>{{0, 1}, {10, 11}}));
}

TEST_F(SpawnBesideThreads, SeveralLaunchesRunAtTheSameTime) {
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      const auto method = i % 2 == 0 ? StartMethod::fork : StartMethod::forkserver;
      if (spawn("tell", {i}, options(2, method)).results()[1].at("args") == Value{i}) ++right;
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(right, 4);
}

TEST_F(SpawnFork, ADeadZygoteIsReplaced) {
  spawn("tell", {}, options(2, StartMethod::forkserver));
  int killed = 0;
  for (const pid_t pid : ipc::children())
    if (is_our_zygote(pid)) {
      kill(pid, SIGKILL);
      ++killed;
    }
  EXPECT_EQ(killed, 1);
  EXPECT_EQ(spawn("tell", {}, options(2, StartMethod::forkserver)).results()[1].at("rank"), 1);
}

}  // namespace
}  // namespace accelmgr::launch::test
