// Takes the batches of an attempt from the queue of a runner, one after the other, until the attempt has
// enough, the data ends, or the attempt is over.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "engine/replica/replica.hpp"
#include "engine/session/batch_queue.hpp"
#include "engine/session/manifest.hpp"

namespace accelmgr::runner {

/// Thrown when an attempt cannot be computed, with the reason. Ends the attempt.
struct AttemptRefused {
  session::Reason reason;  ///< none: the attempt is over already, so no reason is recorded.
  std::string what;
};

/// Used by one thread.
class Batches {
 public:
  using Filled = session::BatchQueue::Filled;

  Batches(const Config& config, const session::Session& session, const session::Manifest& manifest, int rank)
      : config_(config), manifest_(manifest), queue_(session, rank) {}

  /// Returns batch `index` of the attempt under way. Returns nullopt when a short step has none for this
  /// rank. Blocks until the batch is there, and calls `give_up` at least every 20 ms. Adds the time that it
  /// waited to `waited_ns`. Throws AttemptRefused.
  std::optional<Filled> next(std::uint64_t index, const std::function<bool()>& give_up,
                             std::uint64_t& waited_ns) const;

  /// The fields of a batch. They point into the queue.
  std::vector<replica::Field> fields_of(Filled filled) const;

 private:
  const Config& config_;
  const session::Manifest& manifest_;
  session::BatchQueue queue_;
};

}  // namespace accelmgr::runner
