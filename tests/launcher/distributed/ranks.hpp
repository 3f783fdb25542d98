// Runs a test's body in several processes that know their ranks.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/launch.hpp"
#include "refusal.hpp"

namespace accelmgr::test {

using launch::Value;

/// Runs `body` in `count` forked ranks of one node, as launch::spawn() starts them. A failed expectation in a
/// rank fails the test.
void expect_on_ranks(int count, const std::function<void(int rank)>& body,
                     const std::map<std::string, std::string>& environment = {});

/// Likewise, but the ranks have only `variables` in their environment, as if another launcher had started
/// them. "{rank}" in a value is replaced by the rank.
void on_strangers(int count, const std::map<std::string, std::string>& variables,
                  const std::function<void(int rank)>& body);

/// Expects that this process is `rank` of a world of `size` on one node.
void expect_place(int rank, int size);
/// Makes a collective with all ranks of a world of `size`.
void expect_world_of(int size);

/// What is logged on the level info or above while `call` runs.
std::vector<std::string> log_lines_of(const std::function<void()>& call);

/// The ranks that the CollectiveError of `call` names. Its cause must be that they made different calls.
template <typename Call>
std::vector<int> mismatched(Call&& call) {
  try {
    call();
  } catch (const CollectiveError& error) {
    EXPECT_EQ(error.cause(), CollectiveError::Cause::mismatch) << error.what();
    return error.ranks();
  }
  ADD_FAILURE() << "no CollectiveError";
  return {};
}

/// Sets a variable of this process while the object exists. nullopt unsets it.
class Variable {
 public:
  Variable(const char* name, const std::optional<std::string>& value);
  ~Variable();
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const std::optional<std::string>& value);

  const char* name_;
  std::optional<std::string> before_;
};

}  // namespace accelmgr::test
