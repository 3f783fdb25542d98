// refusal(): the text and the key of the ConfigError that a call throws. says(): whether a text has all
// parts.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "accelmgr/errors.hpp"

namespace accelmgr::test {

struct Refusal {
  std::string text;
  std::string key;
};

/// The test fails if `call` throws no ConfigError.
template <class Call>
Refusal refusal(Call&& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return {error.what(), error.key()};
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

template <class Call>
std::string config_key_of(Call&& call) {
  return refusal(call).key;
}

inline ::testing::AssertionResult says(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts)
    if (text.find(part) == std::string::npos)
      return ::testing::AssertionFailure() << "no '" << part << "' in: " << text;
  return ::testing::AssertionSuccess();
}
inline ::testing::AssertionResult says(const Refusal& refusal, const std::vector<std::string>& parts) {
  return says(refusal.text, parts);
}

inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  EXPECT_TRUE(says(text, parts));
}

}  // namespace accelmgr::test
