// expect_error(): checks the CollectiveError that a call throws.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"

namespace accelmgr::test {

/// Returns the message. The test fails if there is no CollectiveError, or one of another cause or other
/// ranks.
template <class Call>
std::string expect_error(CollectiveError::Cause cause, const std::vector<int>& ranks, Call&& call) {
  try {
    call();
  } catch (const CollectiveError& error) {
    EXPECT_EQ(error.cause(), cause) << error.what();
    EXPECT_EQ(error.ranks(), ranks) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace accelmgr::test
