#include "accelmgr/errors.hpp"

#include <fmt/format.h>

#include <cstring>

namespace accelmgr {

SystemError::SystemError(const std::string& what, int code)
    : Error(
          fmt::format("{}: {} (errno {})", what, strerrordesc_np(code) ? strerrordesc_np(code) : "?", code)),
      code_(code) {}

}  // namespace accelmgr
