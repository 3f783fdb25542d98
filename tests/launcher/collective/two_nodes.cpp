#include "two_nodes.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>

#include "base/clock.hpp"
#include "launcher/distributed/store/file_store.hpp"
#include "places.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::collective::two_nodes_test {
namespace {

constexpr int skipped = 77;
constexpr int seconds_of_a_scenario = 120;

std::string script() { return test::in_checkout("tests/launcher/contract/two_nodes"); }

/// Runs the scenario in the process of a rank. Returns its exit code.
int run_rank(void (*scenario)(RankOnNode&), int rank, std::size_t size) {
  try {
    distributed::FileStore store(std::getenv("STORE_OF_TWO_NODES"),
                                 base::Deadline::in_seconds(seconds_of_a_scenario));
    RankOnNode self(store, rank, static_cast<int>(size));
    scenario(self);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
  }
  std::cout << std::flush;
  return testing::Test::HasFailure() ? 1 : 0;
}

/// Forks the ranks of this node and checks their ends.
void run_node(const Nodes& nodes, const std::vector<int>& ranks, void (*scenario)(RankOnNode&)) {
  std::vector<pid_t> pids;
  for (const int rank : ranks) {
    pids.push_back(fork());
    if (pids.back() != 0) continue;
    alarm(seconds_of_a_scenario);
    _exit(run_rank(scenario, rank, nodes.a.size() + nodes.b.size()));
  }
  for (std::size_t i = 0; i < pids.size(); ++i) {
    int status = -1;
    waitpid(pids[i], &status, 0);
    const bool dies = std::ranges::find(nodes.deaths, ranks[i]) != nodes.deaths.end();
    EXPECT_TRUE(dies ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0)
        << "rank " << ranks[i] << " ended with wait status " << status;
  }
}

}  // namespace

std::shared_ptr<Communicator> RankOnNode::meet(double timeout_s, const std::string& backend) {
  return rendezvous(
      store_, "world",
      {.rank = rank_, .size = size_, .backend = backend, .timeout_s = timeout_s, .interface = {}});
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

void run_on_two_nodes(const Nodes& nodes, void (*scenario)(RankOnNode&)) {
  if (const char* name = std::getenv("TWO_NODES_NAME"))
    return run_node(nodes, *name == 'A' ? nodes.a : nodes.b, scenario);
  const test::TemporaryFolder folder;
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  const auto command =
      fmt::format("'{}' --gtest_filter={}.{}", std::filesystem::read_symlink("/proc/self/exe").string(),
                  test->test_suite_name(), test->name());
  const auto output = (folder / "output").string();
  const int status = std::system(
      fmt::format("STORE_OF_TWO_NODES='{}' '{}' --timeout {} --cable {} --node A {} --node B {} >'{}' 2>&1",
                  (folder / "store").string(), script(), seconds_of_a_scenario, nodes.cable_mbit, command,
                  command, output)
          .c_str());
  std::ifstream file(output);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (WEXITSTATUS(status) == skipped) GTEST_SKIP() << text;
  EXPECT_EQ(status, 0) << text;
}

void take_link_down() {
  if (std::system(fmt::format("'{}' --link down", script()).c_str()) != 0)
    throw std::runtime_error("the link was not taken down");
}

}  // namespace accelmgr::collective::two_nodes_test
