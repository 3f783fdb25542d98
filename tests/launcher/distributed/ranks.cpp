#include "ranks.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>

#include "accelmgr/distributed_context.hpp"
#include "launcher/launch/plan/child_environment.hpp"

namespace accelmgr::test {
namespace {

constexpr double timeout_s = 60;

Value checked(const std::function<Value(int)>& body, int rank) {
  auto result = body(rank);
  if (testing::Test::HasFailure()) throw std::runtime_error("expectations failed; they are printed above");
  return result;
}

void set_variable(const std::string& name, std::string value, int rank) {
  if (const auto at = value.find("{rank}"); at != std::string::npos)
    value.replace(at, 6, std::to_string(rank));
  ::setenv(name.c_str(), value.c_str(), 1);
}

}  // namespace

std::vector<Value> on_ranks(int count, const std::function<Value(int)>& body,
                            const std::map<std::string, std::string>& environment) {
  launch::Options options;
  options.nprocs = count;
  options.start_method = launch::StartMethod::fork;
  options.backend = "shm";
  options.timeout_s = timeout_s;
  options.environment = environment;
  const launch::Function function = [&body](int rank, const Value&) { return checked(body, rank); };
  auto context = launch::spawn(function, Value::array(), options);
  return context.results();
}

void expect_on_ranks(int count, const std::function<void(int)>& body,
                     const std::map<std::string, std::string>& environment) {
  on_ranks(
      count,
      [&body](int rank) {
        body(rank);
        return Value();
      },
      environment);
}

std::vector<Value> on_strangers(int count, const std::map<std::string, std::string>& variables,
                                const std::function<Value(int)>& body) {
  return on_ranks(count, [&](int rank) {
    for (const auto& name : launch::launch_variables()) ::unsetenv(name.c_str());
    for (const auto& [name, value] : variables) set_variable(name, value, rank);
    distributed::sync();
    return body(rank);
  });
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
