// Text that came from a torn place: what others are to read must be UTF-8.
#pragma once

#include <string>
#include <string_view>

namespace accelmgr::base {

/// `text`, with each run of bytes that is no UTF-8 replaced by one U+FFFD.
std::string valid_utf8(std::string_view text);

}  // namespace accelmgr::base
