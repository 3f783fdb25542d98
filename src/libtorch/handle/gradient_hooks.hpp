// Gradient capture: a hook on each parameter tells of its new gradient. A replica in CPU memory passes it to
// the sink and leaves `.grad` undefined, so that autograd never accumulates. On a device autograd accumulates
// in `.grad`, and the sum is copied once.
//
// What counts of a micro-batch is what `.grad` holds after the backward pass of its loss, as in plain
// libtorch. forward() may have backward passes of its own before: what they leave in `.grad` is added, unless
// forward() drops it.
//
// Before the hook, the gradient's memory belongs to autograd and to the user's hooks, which may keep it. So
// autograd must not write into the slab directly. (An allocator that lent the slab to autograd saved the
// copy, 9 ms of 49 for 128 MiB, but gave wrong gradients where one autograd node makes two gradients of the
// same size: LSTM, attention.)
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "base/unmovable.hpp"
#include "engine/replica/replica.hpp"

namespace accelmgr::libtorch {

/// The gradient of a parameter, dense, in the order in memory that TensorEntry::gradient_strides() says.
at::Tensor dense_gradient(const at::Tensor& parameter);

/// Used by one thread; hooks run on the thread that computes backward().
class GradientHooks : base::Unmovable {
 public:
  /// Called with the index of a parameter whose `.grad` is complete in this micro-batch.
  using Completed = std::function<void(std::size_t index, const at::Tensor& parameter)>;

  /// Passes each gradient to the sink, and resets `.grad`. Parameter i is the i-th of the manifest. `sink`
  /// must outlive this object.
  GradientHooks(std::vector<at::Tensor> parameters, replica::GradientSink& sink);
  /// Leaves `.grad` as it is.
  GradientHooks(std::vector<at::Tensor> parameters, Completed completed);
  ~GradientHooks();

  /// Call it before an attempt. Drops gradients that an aborted attempt left in `.grad`.
  void begin();
  /// Call it before forward(), which then finds `.grad` undefined, whatever other micro-batches have left.
  void begin_micro_batch();
  /// Call them before and after the backward pass of the loss.
  void begin_backward();
  void end_backward();
  /// Call it after the last backward() of an attempt. Completes gradients that are still in `.grad`: those of
  /// parameters on which the model has its own post-accumulate hook. That hook sees the sum over
  /// micro-batches. Where `.grad` stays as it is, completes all gradients.
  void finish();

 private:
  GradientHooks(std::vector<at::Tensor> parameters, Completed completed, bool stays);

  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace accelmgr::libtorch
