// Receives the gradients of a replica. The first gradient of a parameter in an attempt is copied into the
// slab of the rank, later ones are added. The same pass over memory looks for Inf and NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/session/manifest.hpp"
#include "engine/session/shards.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::runner {

/// Used by one thread.
class Gradients {
 public:
  Gradients(const session::RunnerView& runner, const session::Manifest& manifest)
      : runner_(runner), entries_(manifest.tensors), plan_(manifest) {}

  /// Gradients that follow belong to `attempt`.
  void begin(std::uint64_t attempt);
  /// Captures the gradient of parameter `index`. Throws ModelError when there is no such parameter.
  void capture(std::size_t index, const void* gradient);
  /// Where a device writes the gradient of parameter `index`, in the slab's dtype. Throws ModelError when
  /// there is no such parameter.
  std::byte* place_of(std::size_t index) const;
  /// The gradients of the parameters that are trained from the start, for a device that writes them.
  std::span<std::byte> slab() const noexcept;
  /// Counts gradients that lie in their places as captured. Throws ModelError when there is no such
  /// parameter, or when the attempt has a gradient of it already.
  void arrived(std::span<const std::size_t> indices);
  /// The largest magnitude of the gradient of parameter `index`; infinite or NaN if a value of it is.
  void note(std::size_t index, double magnitude);
  /// Calls note() for a gradient that is not captured.
  void look_at(std::size_t index, const void* gradient);
  /// Copies a shard of a team's sum to its place, unless `sums` is that place. The parts of parameters in it
  /// count as captured. In an attempt a rank has at most one part of each.
  void shard(const session::Bytes& shard, const std::byte* sums);
  /// See replica::GradientSink.
  bool is_trained(std::size_t index) const noexcept;
  /// Names of the parameters whose gradient was not finite in this attempt, in order of arrival.
  std::vector<std::string> nonfinite() const;
  /// The range of all gradients of this attempt.
  session::SumRange range() const noexcept { return range_; }

 private:
  const session::TensorEntry& entry_of(std::size_t index) const;
  /// As entry_of(), but also throws ModelError if the parameter is frozen.
  const session::TensorEntry& trained(std::size_t index) const;
  /// Tags the parameter with the attempt: these elements of its gradient are in the slab.
  void keep(std::size_t index, std::uint64_t first = 0, std::uint64_t end = session::Tag::to_the_end);

  session::RunnerView runner_;
  const std::vector<session::TensorEntry>& entries_;
  session::ShardPlan plan_;
  std::uint64_t attempt_ = 0;
  std::vector<std::size_t> nonfinite_;
  session::SumRange range_{};
};

}  // namespace accelmgr::runner
