// A tensor and its name in a model or a batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace accelmgr {

struct NamedTensor {
  std::string name{};
  at::Tensor tensor{};
};

}  // namespace accelmgr
