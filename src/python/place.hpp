// Where a parameter of the master, or the gradient of one, lies in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "accelmgr/dtype.hpp"
#include "engine/session/manifest.hpp"
#include "python/memory.hpp"

namespace accelmgr::python {

/// A parameter of the master, or the gradient of one.
struct Place {
  std::string name;
  std::vector<std::string> aliases;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  bool persistent = true;  ///< Part of checkpoints.
  Memory memory;
};

Place place_of(const session::TensorEntry& entry, DType dtype, std::byte* data,
               std::vector<std::int64_t> strides, std::shared_ptr<const void> owner);

}  // namespace accelmgr::python
