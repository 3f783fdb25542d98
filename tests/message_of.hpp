// message_of(): the message of the exception that a call throws.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <typeinfo>

namespace accelmgr::test {

/// Returns the message of the exception that `call` throws. The test fails if `call` throws nothing, or an
/// exception whose type is not exactly `Exception`.
template <typename Exception, typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Exception& error) {
    EXPECT_TRUE(typeid(error) == typeid(Exception)) << error.what();
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

}  // namespace accelmgr::test
