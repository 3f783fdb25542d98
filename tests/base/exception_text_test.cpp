#include "base/exception_text.hpp"

#include <gtest/gtest.h>

#include <exception>
#include <stdexcept>

namespace accelmgr::base {
namespace {

struct Silent : std::exception {
  const char* what() const noexcept override { return ""; }
};

template <class Exception>
std::string text_of(const Exception& exception) {
  try {
    throw exception;
  } catch (...) {
    return current_exception_text();
  }
}

TEST(ExceptionText, IsWhatItSays) { EXPECT_EQ(text_of(std::runtime_error("on fire")), "on fire"); }

TEST(ExceptionText, IsItsTypeWhereItSaysNothing) {
  EXPECT_EQ(text_of(Silent()),
            "an exception of type accelmgr::base::(anonymous namespace)::Silent without a text");
  EXPECT_EQ(text_of(std::runtime_error("")), "an exception of type std::runtime_error without a text");
}

TEST(ExceptionText, IsItsTypeWhereItIsNoException) {
  EXPECT_EQ(text_of(42), "an exception of type int without a text");
}

}  // namespace
}  // namespace accelmgr::base
