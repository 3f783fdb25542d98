// Builds a model once for several processes that train it (accelmgr/multiprocess_launch.hpp).
#pragma once

#include <memory>

#include "accelmgr/distributed.hpp"
#include "accelmgr/model.hpp"
#include "accelmgr/multiprocess_launch.hpp"

namespace accelmgr {

/// A model that is built once, before the processes are forked. Each process moves it to its own device, one
/// process at a time.
class ModelWrapper {
 public:
  explicit ModelWrapper(std::shared_ptr<Model> model);
  /// Moves parameters and buffers to `device` and returns the model. The tensor objects stay the same; their
  /// memory moves. Throws ModelError when a tensor cannot be moved; none is moved then.
  Model& to(at::Device device);

 private:
  std::shared_ptr<Model> model_;
  launch::SerialExecutor turn_;
};

}  // namespace accelmgr
