// The parameters of a runner with `runners.parameters: bf16`: those of float32 are rounded copies of the
// master's, in memory of the runner's own; all others are the master's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/ipc/memory.hpp"
#include "engine/replica/replica.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::runner {

/// Used by one thread. Runner and manifest outlive it.
class RoundedParameters {
 public:
  /// Throws SystemError or SessionError if there is no memory.
  RoundedParameters(const session::RunnerView& runner, const session::Manifest& manifest);

  /// The place of each parameter of the manifest. There are values after the first load().
  std::vector<replica::Place> places() const;
  /// The host has written parameters: rounds those that are stale again, to nearest even.
  void load(const std::function<bool(std::size_t)>& is_stale);

 private:
  const session::RunnerView& runner_;
  const session::Manifest& manifest_;
  std::vector<std::uint64_t> offsets_;  ///< Of each parameter, in memory_.
  ipc::Mapping memory_;
};

}  // namespace accelmgr::runner
