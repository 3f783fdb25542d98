// How gradients leave autograd: a hook on each parameter copies its fresh gradient into the slab the first
// time in an attempt, adds it later, looks for Inf and NaN while it is hot, and leaves `.grad` undefined, so
// that autograd never adds.
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
  void begin(std::uint64_t attempt) noexcept;
  /// loss.backward(), with gradients born in the slab where that is possible.
  void backward(const at::Tensor& loss);
  /// The parameters of this attempt whose gradient was not finite, in the order in which they came.
  std::vector<std::string> nonfinite() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace accelmgr::tensor
