// Makes text valid UTF-8 that may have been cut anywhere.
#pragma once

#include <string>
#include <string_view>

namespace accelmgr::base {

/// Returns `text` with each run of bytes that are not UTF-8 replaced by one U+FFFD.
std::string valid_utf8(std::string_view text);

}  // namespace accelmgr::base
