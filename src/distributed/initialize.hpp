// initialize(), for callers that have bound the master's port already.
#pragma once

#include "accelmgr/distributed.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::distributed {

/// `socket` listens at the address where rank 0 serves the store; only rank 0's is used, and none is needed.
void initialize(const std::string& backend, const InitializeOptions& options, base::UniqueFd socket);

}  // namespace accelmgr::distributed
