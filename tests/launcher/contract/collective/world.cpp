#include "world.hpp"

#include <fmt/format.h>
#include <gtest/gtest-spi.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <stdexcept>
#include <thread>

#include "base/ipc/processes.hpp"

namespace accelmgr::collective::contract {
namespace {

constexpr double process_timeout_s = 100;  // Reached only by a test that fails.

// Descriptors of an executed rank; from first_prepared_fd on: those of Prepared.
constexpr int report_fd = 10;
constexpr int meeting_fd = 11;
constexpr int first_prepared_fd = 12;

/// Runs `body`. Returns the assertions that failed in it on this thread, and its exception.
template <class Function>
std::vector<std::string> failures_of(Function&& body) {
  testing::TestPartResultArray results;
  std::vector<std::string> failures;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &results);
    try {
      body();
    } catch (const std::exception& error) {
      failures.push_back(fmt::format("exception: {}", error.what()));
    }
  }
  for (int i = 0; i < results.size(); ++i) {
    const auto& result = results.GetTestPartResult(i);
    if (result.passed() || result.skipped()) continue;
    failures.push_back(fmt::format("{}:{}: {}", result.file_name() == nullptr ? "?" : result.file_name(),
                                   result.line_number(), result.message()));
  }
  return failures;
}

struct Place {
  const Backend& backend;
  Start start;
  int rank;
  int size;
  double timeout_s;
};

std::vector<std::string> run_rank(const Place& place, const Prepared& prepared, int meeting_memory,
                                  const std::function<void(Rank&)>& body) {
  auto failures = failures_of([&] {
    Meeting meeting(meeting_memory);
    const auto world = place.backend.join(prepared, place.rank, place.size, place.timeout_s);
    Rank self{*world, place.backend, place.start, meeting};
    body(self);
  });
  for (auto& failure : failures) failure = fmt::format("rank {}: {}", place.rank, failure);
  return failures;
}

// A report is a memfd with one failure after the other, each ended by a zero byte. It can be read when its
// writer is dead.

base::UniqueFd create_report() {
  base::UniqueFd report(memfd_create("report", MFD_CLOEXEC));
  if (!report) throw std::runtime_error("memfd_create");
  return report;
}

void write_report(int report, const std::vector<std::string>& failures) {
  for (const auto& failure : failures)
    if (write(report, failure.c_str(), failure.size() + 1) < 0) _exit(3);
}

std::vector<std::string> read_report(int report) {
  std::vector<std::string> failures;
  std::string text(static_cast<std::size_t>(lseek(report, 0, SEEK_END)), '\0');
  if (pread(report, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
    return {"its report cannot be read"};
  for (std::size_t at = 0; at < text.size(); at += failures.back().size() + 1)
    failures.emplace_back(text.c_str() + at);
  return failures;
}

/// A rank that is a process. The destructor kills it.
struct Process {
  ipc::Child child;
  base::UniqueFd report;

  Process() = default;
  Process(Process&&) noexcept = default;
  ~Process() { end(); }

  /// Kills the process if it has not ended. Reaps it and returns its wait status.
  int end() noexcept {
    if (!child.pidfd) return 0;
    ipc::send_signal(child.pidfd.get(), SIGKILL);
    int status = 0;
    waitpid(child.pid, &status, 0);
    child.pidfd.reset();
    return status;
  }
};

Process fork_rank(const Place& place, const Prepared& prepared, int meeting_memory, Body body) {
  Process process;
  process.report = create_report();
  process.child = ipc::test::fork_child([&, parent = getpid()] {
    ipc::die_with(parent);
    write_report(process.report.get(), run_rank(place, prepared, meeting_memory, body));
    return 0;
  });
  return process;
}

Process execute_rank(const Place& place, const Prepared& prepared, int meeting_memory,
                     const Promise& promise) {
  Process process;
  process.report = create_report();
  std::vector<std::pair<int, int>> fds{{process.report.get(), report_fd}, {meeting_memory, meeting_fd}};
  for (const auto& fd : prepared.fds)
    fds.emplace_back(fd.get(), first_prepared_fd + static_cast<int>(&fd - prepared.fds.data()));
  process.child =
      ipc::execute_self({role_argument, std::to_string(getpid()), promise.suite + "." + promise.name,
                         place.backend.name, std::to_string(place.rank), std::to_string(place.size),
                         prepared.text, std::to_string(prepared.fds.size())},
                        fds);
  return process;
}

/// The failures that the rank's process reported, and how it ended if that is a failure. Reaps the process.
/// It is called only when all ranks have ended, so other ranks see a dead one unreaped, as with a slow fork
/// server.
std::vector<std::string> failures_of_process(Process& process, int rank, const Meeting& meeting, bool ended) {
  auto failures = read_report(process.report.get());
  const int status = process.end();
  if (!ended)
    failures.push_back(fmt::format("rank {}: did not end within {} s", rank, process_timeout_s));
  else if (status != 0 && !(WIFSIGNALED(status) && meeting.died_ns(rank) != 0))
    failures.push_back(fmt::format("rank {}: {}", rank, ipc::describe_exit(status)));
  return failures;
}

std::vector<std::string> run_processes(const Backend& backend, Start start, int size,
                                       const Promise& promise) {
  const auto prepared = backend.prepare(size);
  const auto memory = Meeting::create();
  std::vector<Process> processes;
  for (int rank = 0; rank < size; ++rank) {
    const Place place{backend, start, rank, size, world_timeout_s};
    processes.push_back(start == Start::forked ? fork_rank(place, prepared, memory.get(), promise.body)
                                               : execute_rank(place, prepared, memory.get(), promise));
  }
  const auto deadline = base::Deadline::in_seconds(process_timeout_s);
  std::vector<bool> ended;
  for (const auto& process : processes) ended.push_back(ipc::wait_ended(process.child.pidfd.get(), deadline));
  const Meeting meeting(memory.get());
  std::vector<std::string> failures;
  for (int rank = 0; rank < size; ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    for (auto& failure : failures_of_process(processes[at], rank, meeting, ended[at]))
      failures.push_back(std::move(failure));
  }
  return failures;
}

}  // namespace

std::vector<std::string> run_world(const Backend& backend, Start start, int size, const Promise& promise) {
  return start == Start::threads ? run_threads(backend, size, promise.body)
                                 : run_processes(backend, start, size, promise);
}

std::vector<std::string> run_threads(const Backend& backend, int size, const std::function<void(Rank&)>& body,
                                     double timeout_s) {
  const auto prepared = backend.prepare(size);
  const auto memory = Meeting::create();
  std::vector<std::vector<std::string>> of_ranks(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] {
        const Place place{backend, Start::threads, rank, size, timeout_s};
        of_ranks[static_cast<std::size_t>(rank)] = run_rank(place, prepared, memory.get(), body);
      });
  }
  std::vector<std::string> failures;
  for (const auto& of_rank : of_ranks) failures.insert(failures.end(), of_rank.begin(), of_rank.end());
  return failures;
}

int play_rank(const std::vector<std::string>& arguments) {
  ipc::die_with(std::stoi(arguments.at(0)));
  const auto& promise = find_promise(arguments.at(1));
  Prepared prepared;
  prepared.text = arguments.at(5);
  for (int i = 0; i < std::stoi(arguments.at(6)); ++i) prepared.fds.emplace_back(first_prepared_fd + i);
  const Place place{find_backend(arguments.at(2)), Start::executed, std::stoi(arguments.at(3)),
                    std::stoi(arguments.at(4)), world_timeout_s};
  write_report(report_fd, run_rank(place, prepared, meeting_fd, promise.body));
  return 0;
}

}  // namespace accelmgr::collective::contract
