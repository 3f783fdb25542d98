// How gradients leave autograd: a hook on each parameter copies its fresh gradient into the slab the first
// time in an attempt, adds it later, looks for Inf and NaN while it is hot, and leaves `.grad` undefined, so
// that autograd never adds.
//
// Until then a gradient's memory belongs to autograd and to the user's hooks, who may keep it: the slab is
// never lent to them. (An allocator that did lend it saved the copy, and gave wrong gradients wherever one
// autograd node makes two of the same size.)
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "session/manifest.hpp"
#include "session/session.hpp"
#include "tensor/master.hpp"

namespace accelmgr::tensor {

/// The take-over of one runner. Used by one thread; hooks run on the thread that calls backward().
class TakeOver {
 public:
  TakeOver(const session::Session& session, const session::Manifest& manifest, const ModelTensors& model,
           int rank);
  ~TakeOver();
  TakeOver(const TakeOver&) = delete;
  TakeOver& operator=(const TakeOver&) = delete;

  /// Gradients of backward() belong to `attempt` from now on.
  void begin(std::uint64_t attempt);
  /// loss.backward() of a micro-batch.
  void backward(const at::Tensor& loss);
  /// After the last backward() of an attempt: takes over what is still in `.grad`. That is the gradient of a
  /// parameter with a hook of the model's own after accumulation, which sees the sum over micro-batches.
  void finish();
  /// The parameters of this attempt whose gradient was not finite, in the order in which they came.
  std::vector<std::string> nonfinite() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace accelmgr::tensor
