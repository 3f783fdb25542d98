// Errors of starting processes that say which limit was reached.
#pragma once

#include "accelmgr/errors.hpp"

namespace accelmgr::launch {

/// Of a rank that the launcher could not fork; `error` is an errno value.
SystemError not_forked(int rank, int error);

/// `error`, with the limit that it speaks of, of those that starting processes can reach.
SystemError with_limit(const SystemError& error);

}  // namespace accelmgr::launch
