// torch's dtypes as the collectives name them.
#pragma once

#include <c10/core/ScalarType.h>

#include "accelmgr/communicator.hpp"

namespace accelmgr::distributed {

/// Throws UsageError, which names the dtype, for those that no collective makes sense of (quantized, bits,
/// 8-bit and smaller floats, complex halves).
DType dtype_of(at::ScalarType type);

}  // namespace accelmgr::distributed
