// What exceptions of others say: of any type, and never nothing.
#pragma once

#include <string>

namespace accelmgr::base {

/// In a handler: what the exception says; its type where it says nothing, or is no std::exception.
std::string current_exception_text();

}  // namespace accelmgr::base
