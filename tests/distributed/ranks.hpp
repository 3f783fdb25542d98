// A test's body in several processes that know their ranks.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/launch.hpp"

namespace accelmgr::test {

using launch::Value;

/// `body` in `count` forked ranks of one host, as launch::spawn() starts them; what they returned. A rank
/// whose expectations fail fails the test.
std::vector<Value> on_ranks(int count, const std::function<Value(int rank)>& body,
                            const std::map<std::string, std::string>& environment = {});
void expect_on_ranks(int count, const std::function<void(int rank)>& body,
                     const std::map<std::string, std::string>& environment = {});

/// As on_ranks(), but with no more in their environment than what `variables` says: whoever started them is
/// none of ours. "{rank}" in a value stands for the rank.
std::vector<Value> on_strangers(int count, const std::map<std::string, std::string>& variables,
                                const std::function<Value(int rank)>& body);

/// Of this process, while it exists; nullopt: not set.
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
