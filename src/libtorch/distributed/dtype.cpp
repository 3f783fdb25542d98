#include "libtorch/distributed/dtype.hpp"

#include <fmt/format.h>

#include "accelmgr/errors.hpp"
#include "libtorch/tensor/convert.hpp"

namespace accelmgr::distributed {
namespace {

bool has_collectives(DType dtype) noexcept { return dtype <= DType::boolean; }

template <class Name>
[[noreturn]] void refuse(const Name& name) {
  throw UsageError(fmt::format("tensors of dtype {} are not supported in collectives", name));
}

}  // namespace

DType dtype_of(at::ScalarType type) {
  const auto dtype = tensor::find_dtype(type);
  if (!dtype || !has_collectives(*dtype)) refuse(c10::toString(type));
  return *dtype;
}

at::ScalarType scalar_type(DType dtype) {
  if (!has_collectives(dtype)) refuse(name_of(dtype));
  return tensor::scalar_type(dtype);
}

}  // namespace accelmgr::distributed
