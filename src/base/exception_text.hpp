// The text of an exception of any type. It is never empty.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "accelmgr/errors.hpp"

namespace accelmgr::base {

/// Returns what() of the exception, or the name of its type if what() is empty or it is no std::exception.
/// Requires: an exception is being handled.
std::string current_exception_text();

/// Called in a handler. Returns the text of an exception of a library's own type; nullopt for other types.
using TextOfForeign = std::optional<std::string> (*)();
/// Makes current_exception_text() ask `text_of` first.
/// Requires: called at most once per process, before it has threads.
void know_foreign_exceptions(TextOfForeign text_of);

/// Runs `body`, which is code of the user. An exception becomes an `Exception` that begins with `owner`
/// ("model 'gpt'"). An accelmgr::Error passes unchanged, unless its text is empty.
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

}  // namespace accelmgr::base
