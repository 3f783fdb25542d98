// Counts of a session, as its memory has them.
#pragma once

#include <sys/types.h>

#include "accelmgr/statistics.hpp"
#include "engine/session/session.hpp"

namespace accelmgr::client {

/// `manager`: the process that owns the session. Any process that has mapped the session may call it. Without
/// `memory`, which takes most of the time, no process has a peak of it.
Statistics statistics_of(const session::Session& session, pid_t manager, bool memory = true);

}  // namespace accelmgr::client
