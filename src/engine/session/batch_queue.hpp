// The bounded queue of batches of a rank: a ring of slots in shared memory, with one producer (the loader)
// and one consumer (the runner).
//
// Each step has as many batches of a rank as its share says. In a short step the last ones may have fewer
// elements, or none.
//
// Batch number b lies in slot b mod slots. The producer owns a slot from release to publication, the consumer
// from publication to release. A committed attempt releases the batches that it consumed
// (Counters::batches). The batches of an aborted attempt stay in their slots and are handed out again.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "engine/session/session.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::session {

/// The consumer's side. It only reads.
class BatchQueue {
 public:
  BatchQueue(const Session& session, int rank);

  struct Filled {
    const std::byte* slot;
    std::uint64_t elements;
    std::uint64_t left_out;  ///< Elements of the source that were left out before it.
  };
  /// filled: the batch is there; none: it has no elements, and the rank has no further ones in this step;
  /// ended: the data ended before it; failed: the data source failed before it; empty: it is not there yet.
  enum class State { filled, none, ended, failed, empty };
  /// Looks for batch `number` and does not block. Throws SessionError if the batch has more elements than a
  /// batch can have.
  State look(std::uint64_t number, Filled& out) const;
  /// Like look(), but blocks while the batch is not there. Returns `empty` when `give_up()` is true; it calls
  /// that at least every 20 ms. Spins for `spin_us` before it parks.
  State wait(std::uint64_t number, Filled& out, int spin_us, const std::function<bool()>& give_up) const;
  /// Why the data source failed.
  std::string error() const;

  /// Number of batches that committed attempts have consumed.
  std::uint64_t consumed() const noexcept;
  /// Number of consumed batches whose slots may be filled again: without those of the last attempt, if the
  /// session keeps these.
  std::uint64_t released() const noexcept;
  /// The first batch of the attempt under way: the first that is not consumed or, if the attempt repeats the
  /// last step, that step's first one.
  std::uint64_t first_of_attempt() const noexcept;
  std::uint64_t published() const noexcept { return queue_->published.load(); }
  /// The slot of batch `number`.
  /// Requires: the batch is published or being filled, and not released.
  const std::byte* slot(std::uint64_t number) const noexcept { return queue_bytes() + slot_at(number); }
  /// Number of elements of a published batch.
  /// Requires: the batch is one of the last `slots`.
  std::uint64_t elements(std::uint64_t number) const noexcept;
  /// Elements of the source that were left out before batch `number`.
  /// Requires: the batch is one of the last `slots`, or is being filled.
  std::uint64_t left_out(std::uint64_t number) const noexcept;
  /// Number of elements so far in the batch that is being filled; 0 if the stored number is impossible.
  std::uint64_t filling() const noexcept;

 protected:
  // Offsets in bytes from the queue's beginning.
  std::uint64_t count_at(std::uint64_t number) const noexcept;
  std::uint64_t slot_at(std::uint64_t number) const noexcept;
  const Session& session() const noexcept { return *session_; }

 private:
  std::uint64_t count_of(std::uint64_t number) const noexcept;
  const std::byte* queue_bytes() const noexcept { return reinterpret_cast<const std::byte*>(queue_); }

  const Session* session_;
  const Queue* queue_;
  int rank_;
};

/// The producer's side.
class BatchQueueWriter : public BatchQueue {
 public:
  BatchQueueWriter(const LoaderView& loader, int rank)
      : BatchQueue(loader.session(), rank), queue_(&loader.queue(rank)) {}

  /// The slot of the next batch; null while no slot is free.
  std::byte* claim() const noexcept;
  /// Records that the claimed slot holds `elements` elements so far: a loader that takes over keeps them.
  void fill(std::uint64_t elements) noexcept;
  /// Records that `elements` elements of the source were left out before the next batch.
  /// Requires: that batch has no element yet.
  void leave_out(std::uint64_t elements) noexcept;
  /// Hands the claimed slot, which holds `elements` elements, to the consumer. If the producer is killed in
  /// here, either the batch is published or the slot counts as empty. The same elements are never in both.
  void publish(std::uint64_t elements) noexcept;
  /// Ends the queue after the last published batch; `error` is not empty if the data source failed.
  void finish(const std::string& error = {}) noexcept;
  /// Undoes finish().
  void reopen() noexcept;
  /// Drops all batches that are not consumed, and undoes finish(): the next batch has the number consumed().
  /// Requires: the consumer is not reading.
  void rewind() noexcept;

 private:
  std::byte* bytes() const noexcept { return reinterpret_cast<std::byte*>(queue_); }

  Queue* queue_;
};

}  // namespace accelmgr::session
