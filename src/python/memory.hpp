// Memory of this process or of a session, as objects with Python's buffer protocol; dtypes by name.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "accelmgr/dtype.hpp"

namespace accelmgr::python {

/// Bytes that Python may read and write. A view of them keeps `owner` alive; it may be null.
struct Memory {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const void> owner{};
};

/// The DType of a name as "float32". Throws an Exception that begins with `what` for any other name.
template <class Exception>
DType dtype_named(const std::string& name, const std::string& what);

/// Number of elements from the first to the last one of a tensor, gaps included. Strides are in elements.
std::size_t extent_of(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides);

/// Bytes of a dense tensor.
std::size_t dense_bytes(DType dtype, const std::vector<std::int64_t>& shape);

using NumberTuple = nanobind::typed<nanobind::tuple, nanobind::int_, nanobind::ellipsis>;
NumberTuple tuple_of(const std::vector<std::int64_t>& numbers);

}  // namespace accelmgr::python
