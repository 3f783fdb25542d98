// Text in a session.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>

namespace accelmgr::session {

/// The text in a field that another process writes. It reads at most `bytes`, so a missing end does no harm.
template <std::size_t bytes>
std::string text_of(const char (&field)[bytes]) {
  return {field, strnlen(field, bytes)};
}

}  // namespace accelmgr::session
