#include "roles.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include "accelmgr/errors.hpp"
#include "accelmgr/init.hpp"
#include "base/config/start_method.hpp"
#include "engine/client/handle.hpp"
#include "stage.hpp"

namespace accelmgr::test {
namespace {

StartMethod method_of(const std::string& name) {
  for (const auto method : {StartMethod::fork, StartMethod::forkserver})
    if (name == config::name_of(method)) return method;
  return StartMethod::spawn;
}

int start_without_init() {
  try {
    client::Handle(Config{}, {});
  } catch (const UsageError& error) {
    say(error.what());
    return 0;
  }
  return 1;
}

int host(const std::vector<std::string>& arguments, int argc, char** argv) {
  init(argc, argv);
  auto config = staged_config(arguments.at(0));
  config.data.options["fork_at"] = "0";
  client::Handle manager(config, {.method = method_of(arguments.at(3))});
  const auto statistics = manager.statistics();
  std::string pids = fmt::format("{}", statistics.manager_pid);
  for (const auto& runner : statistics.runners) pids += fmt::format(" {}", runner.pid);
  if (arguments.at(1) == "forks") {
    const auto child = fork();
    if (child == 0) {
      wait_for_test();
      _exit(0);
    }
    pids += fmt::format(" {}", child);
  }
  say(pids);
  if (arguments.at(2) == "steps") manager.step();
  wait_for_test();
  return 0;
}

}  // namespace

int play(const std::string& role, const std::vector<std::string>& arguments, int argc, char** argv) {
  if (role == starts_without_init) return start_without_init();
  if (role == hosts) return host(arguments, argc, argv);
  return 2;
}

}  // namespace accelmgr::test
