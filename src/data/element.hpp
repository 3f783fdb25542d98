// What an element looks like, in words, and what its declaration must fulfil.
#pragma once

#include <string>

#include "accelmgr/batch_source.hpp"

namespace accelmgr::data {

/// `float32 [3, 16, 16]`; a number per element: `int64 []`. dtypes by their names in torch.
std::string describe(at::ScalarType dtype, std::span<const std::int64_t> shape);

/// Throws DataError when there are no fields, one has no name, two have the same, or a shape is negative.
void check_fields(std::span<const FieldSpec> fields);

}  // namespace accelmgr::data
