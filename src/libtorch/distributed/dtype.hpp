// Converts between torch's dtypes and those of the collectives.
#pragma once

#include <c10/core/ScalarType.h>

#include "accelmgr/dtype.hpp"

namespace accelmgr::distributed {

/// Throws UsageError, which names the dtype, for a dtype that collectives do not support (quantized, bits,
/// 8-bit and smaller floats, complex halves).
DType dtype_of(at::ScalarType type);

/// The reverse of dtype_of(). Throws UsageError for other dtypes.
at::ScalarType scalar_type(DType dtype);

}  // namespace accelmgr::distributed
