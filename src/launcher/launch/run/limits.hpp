// Errors of starting processes, which say which system limit was reached.
#pragma once

#include "accelmgr/errors.hpp"

namespace accelmgr::launch {

/// The error for a rank that the fork server could not fork. `error` is an errno value.
SystemError not_forked(int rank, int error);

/// Adds the limit and its value to the text, if errno is EAGAIN, EMFILE or ENFILE. Otherwise returns `error`.
SystemError with_limit(const SystemError& error);

}  // namespace accelmgr::launch
