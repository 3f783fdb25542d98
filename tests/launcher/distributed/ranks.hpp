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

/// Runs `body` in `count` forked ranks of one node, as launch::spawn() starts them, and returns their
/// results. A failed expectation in a rank fails the test.
std::vector<Value> on_ranks(int count, const std::function<Value(int rank)>& body,
                            const std::map<std::string, std::string>& environment = {});
void expect_on_ranks(int count, const std::function<void(int rank)>& body,
                     const std::map<std::string, std::string>& environment = {});

/// Like on_ranks(), but the ranks have only `variables` in their environment, as if another launcher had
/// started them. "{rank}" in a value is replaced by the rank.
std::vector<Value> on_strangers(int count, const std::map<std::string, std::string>& variables,
                                const std::function<Value(int rank)>& body);

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
