// Which parameters have a gradient. For an optimizer, no gradient (None) is not a gradient of zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/session/manifest.hpp"
#include "engine/session/session.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::client {

/// Whether committed steps have given each parameter a gradient since it was last zeroed. The master's
/// gradients of the others are zero. One thread uses it.
class Touched {
 public:
  /// What earlier hosts have left: a parameter whose gradient is not zero has one.
  Touched(const session::HostView& view, const session::Manifest& manifest);

  /// A step was committed as `attempt`. Without `accumulate` it has overwritten all gradients.
  void committed(std::uint64_t attempt, bool accumulate);
  /// All gradients were zeroed.
  void none() { parameters_.assign(parameters_.size(), false); }
  void set(std::size_t parameter, bool touched) { parameters_.at(parameter) = touched; }

  /// In the manifest's order.
  const std::vector<bool>& parameters() const noexcept { return parameters_; }

 private:
  const session::Session& session_;
  std::vector<bool> parameters_;
};

}  // namespace accelmgr::client
