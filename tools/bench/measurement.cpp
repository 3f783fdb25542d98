#include "measurement.hpp"

#include <fmt/core.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "accelmgr/errors.hpp"

namespace accelmgr::bench {

bool parse_quick(int argc, char** argv) {
  if (argc == 1) return false;
  if (argc == 2 && std::strcmp(argv[1], "--quick") == 0) return true;
  fmt::print(stderr, "usage: {} [--quick]\n", argv[0]);
  std::exit(2);
}

void emit(const std::string& name, const std::string& in_case, const std::string& metric, double value,
          const std::string& unit, const std::vector<std::pair<std::string, double>>& more) {
  fmt::print(R"({{"name": "{}", "case": "{}", "metric": "{}", "value": {:.4f}, "unit": "{}")", name, in_case,
             metric, value, unit);
  for (const auto& [key, number] : more) fmt::print(R"(, "{}": {})", key, number);
  fmt::print("}}\n");
  std::fflush(stdout);
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void* shared_memory(std::size_t bytes) {
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) throw SystemError(fmt::format("mmap of {} shared bytes", bytes), errno);
  return memory;
}

int exit_code_of(const std::function<void()>& work) noexcept {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}

pid_t fork_worker(const std::function<void()>& work) {
  std::fflush(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) throw SystemError("fork", errno);
  if (pid > 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  const int code = exit_code_of(work);
  std::fflush(nullptr);
  _exit(code);
}

void wait_workers(const std::vector<pid_t>& workers) {
  std::size_t left = workers.size();
  bool failed = false;
  while (left > 0) {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, 0);
    if (ended < 0) throw SystemError("waitpid", errno);
    if (std::find(workers.begin(), workers.end(), ended) == workers.end()) continue;
    --left;
    if (status == 0 || failed) continue;
    failed = true;
    for (const pid_t worker : workers)
      if (worker != ended) kill(worker, SIGKILL);
  }
  if (failed) throw std::runtime_error("a process of the benchmark failed");
}

void run_together(int count, const std::function<void(int)>& work) {
  std::vector<pid_t> workers;
  for (int i = 0; i < count; ++i) workers.push_back(fork_worker([&] { work(i); }));
  wait_workers(workers);
}

Pin::Pin(int index, int among) {
  if (sched_getaffinity(0, sizeof before_, &before_) != 0) throw SystemError("sched_getaffinity", errno);
  if (CPU_COUNT(&before_) < among) return;
  int cpu = 0;
  for (int left = index;; ++cpu) {
    if (CPU_ISSET(cpu, &before_) && left-- == 0) break;
  }
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  sched_setaffinity(0, sizeof one, &one);
}

Pin::~Pin() { sched_setaffinity(0, sizeof before_, &before_); }

}  // namespace accelmgr::bench
