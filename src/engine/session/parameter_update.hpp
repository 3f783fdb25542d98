// The update of parameters that is part of a committed attempt: an inner step whose optimizer has its state
// in the session (Applies::session). Each participant updates one slice of the parameters, when all slices of
// the gradients are reduced. A process may be killed at any instruction.
//
// An update cannot be repeated, so it works chunk by chunk: write the chunk's new values and moments to the
// rank's image, mark the cursor as in flight, copy them to their places, move the cursor on. A process that
// takes over a slice first copies an in-flight chunk from the image. See reduction.hpp for what this relies
// on.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/helper_threads.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/kernels.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/reduction.hpp"
#include "engine/session/session.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::session {

/// The L2 norm of the last attempt's mean gradient before clipping; 0 without clipping.
/// Requires: all slices are reduced.
double gradient_norm(const Session& session) noexcept;

/// Any process that maps the session can finish any slice. Each process has one object, for one thread.
class ParameterUpdate {
 public:
  ParameterUpdate(const View& view, const Manifest& manifest);

  /// For a process that has protected the parameters: another mapping, where it can write them.
  void write_at(std::byte* parameters) noexcept { parameters_ = parameters; }

  /// Updates the slice of `rank` from its cursors to its end. The threads of `helpers`, if there are any,
  /// take parts of a large slice. Waits for nobody but helpers, and allocates no memory.
  /// Requires: the attempt is committed and updates the parameters, and all of its slices are reduced. The
  /// caller is the runner of `rank`, or another process once that runner is known to be dead.
  void finish_slice(int rank, std::uint64_t attempt, base::Helpers* helpers = nullptr) const noexcept;

 private:
  /// A parameter. Places are in bytes from the beginning of a region.
  struct Place {
    std::size_t tensor;                 ///< Its number in the manifest.
    std::uint64_t chunk;                ///< The number of its first chunk.
    std::uint64_t parameter, gradient;  ///< A moment lies where the parameter does, in another region.
    std::uint64_t elements;
    Element type, gradient_type;
  };
  /// What is the same for all chunks of a parameter.
  struct Numbers {
    bool updates;
    Moments moments;
    SgdFactors sgd;
    AdamFactors adam;
  };
  /// A part of a slice, which one thread updates.
  struct Part {
    ChunkRange chunks;
    std::atomic<std::uint64_t>& cursor;
    std::byte* image;
  };
  Part part_of(int rank, const ChunkRange& slice, int index, int parts) const noexcept;
  /// `scale` multiplies the gradients.
  void finish_part(std::uint64_t attempt, double scale, const Part& part) const noexcept;
  Numbers numbers_of(const Place& place, std::uint64_t attempt, double scale) const noexcept;
  void compute(const Numbers& numbers, const Place& place, std::uint64_t element, std::uint64_t count,
               std::byte* image) const noexcept;
  void copy(Moments moments, const Place& place, std::uint64_t element, std::uint64_t count,
            const std::byte* image) const noexcept;

  Session* session_;
  std::byte* parameters_;
  std::vector<Place> places_;  ///< In order of memory.
  std::uint64_t chunks_ = 0;
};

}  // namespace accelmgr::session
