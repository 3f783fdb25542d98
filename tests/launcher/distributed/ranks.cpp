#include "ranks.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "accelmgr/distributed_context.hpp"
#include "base/log.hpp"
#include "base/log_tail.hpp"
#include "launcher/launch/plan/child_environment.hpp"

namespace accelmgr::test {
namespace {

constexpr double timeout_s = 60;

void set_variable(const std::string& name, std::string value, int rank) {
  if (const auto at = value.find("{rank}"); at != std::string::npos)
    value.replace(at, 6, std::to_string(rank));
  ::setenv(name.c_str(), value.c_str(), 1);
}

}  // namespace

void expect_on_ranks(int count, const std::function<void(int)>& body,
                     const std::map<std::string, std::string>& environment) {
  launch::Options options;
  options.nprocs = count;
  options.start_method = launch::StartMethod::fork;
  options.backend = "shm";
  options.timeout_s = timeout_s;
  options.environment = environment;
  const launch::Function function = [&body](int rank, const Value&) -> Value {
    body(rank);
    if (testing::Test::HasFailure()) throw std::runtime_error("expectations failed; they are printed above");
    return {};
  };
  launch::spawn(function, Value::array(), options);
}

void on_strangers(int count, const std::map<std::string, std::string>& variables,
                  const std::function<void(int)>& body) {
  expect_on_ranks(count, [&](int rank) {
    for (const auto& name : launch::launch_variables()) ::unsetenv(name.c_str());
    for (const auto& [name, value] : variables) set_variable(name, value, rank);
    distributed::sync();
    body(rank);
  });
}

void expect_place(int rank, int size) {
  EXPECT_EQ(distributed::get_rank(), rank);
  EXPECT_EQ(distributed::get_local_rank(), rank);
  EXPECT_EQ(distributed::get_world_size(), size);
  EXPECT_EQ(distributed::get_nproc_per_node(), size);
  EXPECT_EQ(distributed::get_nnodes(), 1);
  EXPECT_EQ(distributed::get_node_rank(), 0);
}

void expect_world_of(int size) {
  EXPECT_EQ(distributed::all_reduce(1.0), size);
  distributed::barrier();
}

std::vector<std::string> log_lines_of(const std::function<void()>& call) {
  std::array<char, 4096> text{};
  std::atomic<std::uint64_t> written{0};
  base::keep_log_tail(text, written);
  call();
  auto lines = base::log_lines(text, written.load(), 100);
  base::drop_log_tail();
  return lines;
}

Variable::Variable(const char* name, const std::optional<std::string>& value) : name_(name) {
  if (const char* before = std::getenv(name)) before_ = before;
  set(value);
}

Variable::~Variable() { set(before_); }

void Variable::set(const std::optional<std::string>& value) {
  if (value)
    ::setenv(name_, value->c_str(), 1);
  else
    ::unsetenv(name_);
}

}  // namespace accelmgr::test
