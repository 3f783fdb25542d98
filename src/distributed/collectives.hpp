// What the collectives on tensors share.
#pragma once

#include <ATen/core/Tensor.h>

#include "distributed/group.hpp"

namespace accelmgr::distributed {

/// Throws UsageError for a rank that is not in the world; `other`: or is this process.
void check_rank(const Context& context, const char* call, int rank, bool other = false);

/// all_to_all() without its graph; there is somebody to communicate with.
at::Tensor exchange_blocks(const at::Tensor& tensor, const Members& members);

}  // namespace accelmgr::distributed
