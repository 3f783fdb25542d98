// What exceptions of user code say, where torch may have thrown them.
#pragma once

#include <string>
#include <utility>

#include "accelmgr/errors.hpp"

namespace accelmgr::tensor {

/// In a handler: as base::current_exception_text(), without the frames of C++ that torch's errors end with;
/// these go to the log at debug.
std::string current_exception_text();

/// Runs `body`, code of a user. What it throws becomes an `Exception` that names its owner ("model 'gpt'");
/// errors of accelmgr pass as they are, unless they say nothing.
template <class Exception, class Body>
decltype(auto) in_user_code(const std::string& owner, Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const Error& error) {
    if (*error.what() != 0) throw;
    throw Exception(owner + ": " + current_exception_text());
  } catch (...) {
    throw Exception(owner + ": " + current_exception_text());
  }
}

}  // namespace accelmgr::tensor
