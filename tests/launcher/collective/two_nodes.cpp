#include "two_nodes.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <stdexcept>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "launcher/distributed/store/file_store.hpp"
#include "places.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::collective::two_nodes_test {
namespace {

constexpr const char* role = "--ranks-of-a-node";
constexpr int skipped = 77;
constexpr int seconds_of_a_scenario = 120;

std::vector<int> numbers_of(const std::string& list) {
  std::vector<int> numbers;
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) numbers.push_back(std::stoi(word));
  return numbers;
}

/// Runs the scenario in the process of a rank. Returns its exit code.
int run_rank(const std::string& scenario, const std::string& path, int rank, int size) {
  try {
    distributed::FileStore store(path, base::Deadline::in_seconds(seconds_of_a_scenario));
    RankOnNode self(store, rank, size);
    scenarios().at(scenario).scenario(self);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
  }
  std::cout << std::flush;
  return testing::Test::HasFailure() ? 1 : 0;
}

/// Forks the ranks of one node and waits for their ends. Returns 0 if all ended as the scenario says.
int run_node(const std::string& scenario, const std::string& path, int size, const std::vector<int>& ranks) {
  std::map<pid_t, int> running;
  for (const int rank : ranks) {
    const auto pid = fork();
    if (pid == 0) {
      alarm(seconds_of_a_scenario);
      _exit(run_rank(scenario, path, rank, size));
    }
    running[pid] = rank;
  }
  int result = 0;
  const auto& deaths = scenarios().at(scenario).deaths;
  for (int status = 0; !running.empty();) {
    const auto ended = running.find(wait(&status));
    if (ended == running.end()) continue;
    const bool dies = std::ranges::find(deaths, ended->second) != deaths.end();
    const bool right = dies ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0;
    if (!right) {
      std::cout << "rank " << ended->second << " ended with wait status " << status << std::endl;
      result = 1;
    }
    running.erase(ended);
  }
  return result;
}

std::string program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

/// Runs `command`. Returns its exit code and what it writes.
std::pair<int, std::string> output_of(const std::string& command) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "re");
  if (pipe == nullptr) throw std::runtime_error("popen " + command);
  std::string text;
  std::array<char, 4096> part{};
  for (std::size_t n = 0; (n = fread(part.data(), 1, part.size(), pipe)) > 0;) text.append(part.data(), n);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), text};
}

}  // namespace

std::map<std::string, Entry>& scenarios() {
  static std::map<std::string, Entry> all;
  return all;
}

std::shared_ptr<Communicator> RankOnNode::meet(double timeout_s, const std::string& backend) {
  Membership membership;
  membership.rank = rank_;
  membership.size = size_;
  membership.backend = backend;
  membership.timeout_s = timeout_s;
  return rendezvous(store_, "world", membership);
}

void RankOnNode::die() {
  store_.set(fmt::format("death of {}", rank_), std::to_string(base::now_ns()));
  raise(SIGKILL);
  std::abort();
}

double RankOnNode::seconds_since_death_of(int rank) {
  const auto now = base::now_ns();
  const auto died = store_.get(fmt::format("death of {}", rank), base::Deadline::in_seconds(60));
  return static_cast<double>(now - std::stoll(died)) / 1e9;
}

void run_on_two_nodes(const std::string& scenario, const std::vector<int>& a, const std::vector<int>& b,
                      int cable_mbit) {
  const test::TemporaryFolder folder;
  const auto command = [&](const std::vector<int>& ranks) {
    return fmt::format("'{}' {} {} '{}' {} {}", program(), role, scenario, (folder / "store").string(),
                       a.size() + b.size(), fmt::join(ranks, ","));
  };
  const auto [status, text] =
      output_of(fmt::format("'{}' --timeout {} --cable {} --node A {} --node B {}",
                            test::in_checkout("tests/launcher/contract/two_nodes"), seconds_of_a_scenario,
                            cable_mbit, command(a), command(b)));
  if (status == skipped) GTEST_SKIP() << text;
  EXPECT_EQ(status, 0) << text;
}

void take_link_down() {
  const base::UniqueFd control(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  std::strncpy(address.sun_path, std::getenv("TWO_NODES_CONTROL"), sizeof address.sun_path - 1);
  if (connect(control.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    throw std::runtime_error("nobody listens for the link");
  constexpr std::string_view down = "down\n";
  std::array<char, 8> answer{};
  if (write(control.get(), down.data(), down.size()) != static_cast<ssize_t>(down.size()) ||
      read(control.get(), answer.data(), answer.size()) != 3)
    throw std::runtime_error("the link was not taken down");
}

}  // namespace accelmgr::collective::two_nodes_test

int main(int argc, char** argv) {
  namespace test = accelmgr::collective::two_nodes_test;
  if (argc == 6 && std::string(argv[1]) == test::role) {
    testing::InitGoogleTest();
    return test::run_node(argv[2], argv[3], std::stoi(argv[4]), test::numbers_of(argv[5]));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
