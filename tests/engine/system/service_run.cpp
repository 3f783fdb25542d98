#include "service_run.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <optional>
#include <thread>

#include "accelmgr/init.hpp"
#include "base/config/loader.hpp"
#include "engine/client/observer.hpp"
#include "engine/service/service.hpp"
#include "engine/support/expectations.hpp"

namespace accelmgr::test {
namespace {

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

int serve(const Arguments& arguments) {
  const auto yaml = text_of(arguments.at(0));
  std::optional<gid_t> group;
  if (arguments.size() > 2) group = static_cast<gid_t>(std::stoul(arguments[2]));
  service::serve(config::from_yaml(yaml), {.socket = arguments.at(1), .group = group}, say);
}

int host(const Arguments& arguments) {
  if (arguments.at(1) == "at once") {
    try {
      client::Handle(arguments.at(0), {.timeout_s = 0});
    } catch (const SessionError& error) {
      say(error.what());
    }
    return 0;
  }
  client::Handle manager(arguments.at(0), {.name = "test host", .keep_gradients = true});
  say(manager.unfinished());
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    const auto& deed = arguments[i];
    if (deed == "step") {
      const auto result = manager.step();
      say(result.error.empty() ? to_string(result.status) : result.error);
      continue;
    }
    if (deed == "write" || deed == "update" || deed == "tear") manager.begin_writing();
    if (deed == "tear") {
      auto& first = manager.view().parameters()[0];
      first = std::byte(std::to_integer<int>(first) + 1);
    }
    if (deed == "update") manager.end_writing();
    if (deed == "zero") manager.zero_grad();
    if (deed == "again") {
      execl("/proc/self/exe", "test", role_argument, attaches, arguments.at(0).c_str(), "step", nullptr);
      _exit(3);
    }
    if (deed == "detach") manager.stop();
    say(deed);
  }
  wait_for_test();
  return 0;
}

int observe(const Arguments& arguments) {
  auto observer = client::Observer::attach(arguments.at(0), 30);
  say("observes");
  for (;;) {
    observer.next_step(0.01);
    try {
      observer.parameters(0.01);
    } catch (const SessionError&) {  // The host was between its steps.
    }
  }
}

template <int (*play)(const Arguments&)>
int start(const Arguments& arguments, int argc, char** argv) {
  ipc::die_with(getppid());  // Also when the test is killed because it takes too long.
  init(argc, argv);
  return play(arguments);
}

const RegisteredRole roles[]{{serves, start<serve>}, {attaches, start<host>}, {observes, start<observe>}};

}  // namespace

ServiceRun::ServiceRun(const Config& config)
    : configuration_(folder_.write("config.yaml", config::to_yaml(config))),
      service_(serves, {configuration_, socket()}) {
  const auto ready = service_.line();
  EXPECT_TRUE(ready.starts_with("ready: model")) << ready;
  std::vector<pid_t> runners;
  const auto now = status();
  for (const auto& runner : now["runners"]) runners.push_back(runner["pid"].get<pid_t>());
  processes_ = processes_of(service_.pid(), runners);
}

ServiceRun::~ServiceRun() {
  if (!ended_) {
    EXPECT_EQ(terminate(), 0);
  }
  expect_ended(processes_);
  EXPECT_FALSE(std::filesystem::exists(socket()));
  expect_nothing_left();
}

int ServiceRun::terminate() {
  ended_ = true;
  ipc::send_signal(pidfd(), SIGTERM);
  return service_.status();
}

void ServiceRun::kill() {
  ipc::send_signal(pidfd(), SIGKILL);
  wait();
}

void ServiceRun::wait_until_stopped(int rank) const {
  const auto pid = status()["runners"][static_cast<std::size_t>(rank)]["pid"].get<pid_t>();
  while (ipc::usage(pid).value().state != 'T') std::this_thread::yield();
}

void ServiceRun::wait_until_alone() const {
  while (!status()["host"].is_null()) std::this_thread::yield();
}

Answer ServiceRun::ask(const std::string& method, const std::string& target, const std::string& body,
                       const std::string& head) const {
  auto connection = client::ServiceSocket::connect(socket(), soon());
  const auto answer = connection.ask(method, target, head, body, soon());
  return {answer.status, nlohmann::json::parse(answer.body, nullptr, false)};
}

client::Handle ServiceRun::attach(bool keep_gradients) const {
  return {socket(), {.name = "test", .timeout_s = 30, .keep_gradients = keep_gradients}};
}

AttachedHost::AttachedHost(const ServiceRun& service, std::vector<std::string> deeds)
    : RoleProcess(attaches, [&] {
        deeds.insert(deeds.begin(), service.socket());
        return deeds;
      }()) {}

}  // namespace accelmgr::test
