#include "stage.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <unistd.h>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"

namespace accelmgr::test {
namespace {

constexpr double patience_s = 60;  // Longer than any wait on a loaded machine; only a failing test gets here.

ipc::Mapping map_script(int fd) { return {fd, 0, sizeof(Script), ipc::Access::read_write}; }

}  // namespace

ipc::Mapping open_script(const std::string& path) {
  const base::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) throw SystemError("opening " + path, errno);
  return map_script(fd.get());
}

Script& script_in(const ipc::Mapping& map) { return *reinterpret_cast<Script*>(map.data()); }

void fork_child(Script& script, std::atomic<pid_t>& child, bool apart) {
  const pid_t pid = fork();
  if (pid == 0) {
    if (apart) setsid();
    alarm(120);
    for (;;) pause();
  }
  child.store(pid);
  ipc::advance(script.heard);
}

pid_t execute_sleep(const char* seconds, char* const* environment) {
  char program[] = "sleep";
  char* const arguments[] = {program, const_cast<char*>(seconds), nullptr};
  pid_t pid = 0;
  if (const int error = posix_spawnp(&pid, program, nullptr, nullptr, arguments, environment); error != 0)
    throw SystemError("executing sleep", error);
  return pid;
}

void execute_child(Script& script, std::atomic<pid_t>& child) {
  child.store(execute_sleep("120", environ));
  ipc::advance(script.heard);
}

Stage::Stage()
    : fd_(ipc::create_memfd("stage", sizeof(Script))),
      map_(map_script(fd_.get())),
      script_(script_in(map_)) {}

std::string Stage::path() const { return fmt::format("/proc/{}/fd/{}", getpid(), fd_.get()); }

void Stage::tell(int rank, Act act) {
  script_.act[rank].store(act);
  ipc::advance(script_.told);
}

void Stage::tell_once(int rank, Act act) { script_.once[rank].store(act); }

template <class T>
T Stage::wait_until_set(const std::atomic<T>& heard, const std::string& what) {
  const auto deadline = base::Deadline::in_seconds(patience_s);
  for (;;) {
    const auto seen = ipc::load(script_.heard);
    if (const T value = heard.load()) return value;
    if (deadline.passed()) {
      ADD_FAILURE() << what;
      return {};
    }
    ipc::wait_changed(script_.heard, seen, stage_slice_ns, 0);
  }
}

template pid_t Stage::wait_until_set(const std::atomic<pid_t>& heard, const std::string& what);

void Stage::release_factories() {
  script_.factories_held.store(false);
  ipc::advance(script_.told);
}

void Stage::wait_until_blocked(int rank) {
  wait_until_set(script_.blocked[rank], fmt::format("rank {} did not come to its forward()", rank));
}

void Stage::wait_until_withheld() {
  wait_until_set(script_.withheld, "the source did not come to the element that is withheld");
}

void Stage::withhold_elements_from(std::int64_t number) { script_.withheld_from.store(number); }

void Stage::release_elements() {
  script_.withheld_from.store(0);
  ipc::advance(script_.told);
}

Config staged_config(const std::string& stage_path) {
  Config config;
  config.nprocs = staged_ranks;
  config.batch_size_per_device = staged_batch_size;
  config.prefetch = 2 * staged_batch_size;
  config.runners.threads = 1;
  config.runners.on_loss = LossPolicy::fail;
  config.step_timeout = 60;  // Longer than any successful step on a loaded machine.
  config.model.kind = staged;
  config.model.options["stage"] = stage_path;
  config.data.kind = staged;
  return config;
}

Config staged_config(const Stage& stage) { return staged_config(stage.path()); }

}  // namespace accelmgr::test
