#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/unique_fd.hpp"
#include "case_run.hpp"
#include "role_process.hpp"

namespace accelmgr::test {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepSeen, status, counted, tries)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CaseSeen, disturbed, ended, next, report_ms, states)

namespace {

/// The process of a case. Its result fits into the pipe's buffer, so the process can end before its result is
/// read.
struct Running {
  std::size_t number;
  pid_t pid;
  base::UniqueFd says;
};

[[noreturn]] void become_host(const FaultCase& c, pid_t parent, int into) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // So that the case sees its orphans.
  bool done = false;
  try {
    const testing::ScopedTrace trace(__FILE__, __LINE__, name_of(c));
    const auto text = nlohmann::json(run_case(c)).dump();
    done = !testing::Test::HasFailure() &&
           write(into, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  } catch (const std::exception& error) {
    std::printf("%s: %s\n", name_of(c).c_str(), error.what());
  }
  std::fflush(nullptr);
  _exit(done ? 0 : 1);
}

Running start(const FaultCase& c, std::size_t number) {
  auto [says, into] = make_pipe();
  std::fflush(nullptr);
  const auto parent = getpid();
  const auto pid = fork();
  if (pid < 0) throw SystemError("fork", errno);
  if (pid == 0) become_host(c, parent, into.get());
  return {number, pid, std::move(says)};
}

/// Blocks until one of the processes has ended, and removes it from the list.
Running take_ended(std::vector<Running>& running) {
  for (;;) {
    const auto pid = waitpid(-1, nullptr, 0);
    if (pid < 0) throw SystemError("waitpid", errno);
    for (auto r = running.begin(); r != running.end(); ++r) {
      if (r->pid != pid) continue;
      auto ended = std::move(*r);
      running.erase(r);
      return ended;
    }
  }
}

std::optional<CaseSeen> result_of(const Running& ended) {
  std::string text(4096, 0);
  const auto count = read(ended.says.get(), text.data(), text.size());
  if (count <= 0) return std::nullopt;
  text.resize(static_cast<std::size_t>(count));
  return nlohmann::json::parse(text).get<CaseSeen>();
}

}  // namespace

std::vector<std::optional<CaseSeen>> run_cases(const std::vector<FaultCase>& cases, int at_once) {
  std::vector<std::optional<CaseSeen>> seen(cases.size());
  std::vector<Running> running;
  for (std::size_t next = 0; next < cases.size() || !running.empty();) {
    if (next < cases.size() && running.size() < static_cast<std::size_t>(at_once)) {
      running.push_back(start(cases[next], next));
      ++next;
      continue;
    }
    const auto ended = take_ended(running);
    seen[ended.number] = result_of(ended);
  }
  return seen;
}

}  // namespace accelmgr::test
