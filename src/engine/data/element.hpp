// The description of an element in text, and the check of its declaration.
#pragma once

#include <string>

#include "accelmgr/batch_source.hpp"

namespace accelmgr::data {

/// "float32 [3, 16, 16]"; for one number per element "int64 []". Dtypes have torch's names.
std::string describe(DType dtype, std::span<const std::int64_t> shape);

/// Throws DataError when there are no fields, a field has no name, two fields have the same name, or a shape
/// or dtype is invalid.
void check_fields(std::span<const FieldSpec> fields);

}  // namespace accelmgr::data
