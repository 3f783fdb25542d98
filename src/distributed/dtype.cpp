#include "distributed/dtype.hpp"

#include <fmt/format.h>

namespace accelmgr::distributed {

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return DType::uint8;
    case at::kChar:
      return DType::int8;
    case at::kUInt16:
      return DType::uint16;
    case at::kShort:
      return DType::int16;
    case at::kUInt32:
      return DType::uint32;
    case at::kInt:
      return DType::int32;
    case at::kUInt64:
      return DType::uint64;
    case at::kLong:
      return DType::int64;
    case at::kHalf:
      return DType::float16;
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kFloat:
      return DType::float32;
    case at::kDouble:
      return DType::float64;
    case at::kComplexFloat:
      return DType::complex64;
    case at::kComplexDouble:
      return DType::complex128;
    case at::kBool:
      return DType::boolean;
    default:
      throw UsageError(
          fmt::format("tensors of dtype {} are not supported in collectives", c10::toString(type)));
  }
}

}  // namespace accelmgr::distributed
