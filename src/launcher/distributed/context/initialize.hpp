// initialize() for callers that have already bound the master's port.
#pragma once

#include "accelmgr/distributed_context.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::distributed {

/// As initialize() of accelmgr/distributed_context.hpp. `socket` listens at the address where rank 0 serves
/// the store. Only rank 0 uses it; without one, rank 0 binds the address itself.
void initialize(const std::string& backend, const InitializeOptions& options, base::UniqueFd socket);

}  // namespace accelmgr::distributed
