// A device's bounded queue of batches: a ring of slots in shared memory, one producer (the loader), one
// consumer (the runner).
//
// Batch number b lies in slot b mod slots. The producer owns a slot from release to publication, the consumer
// from publication to release. Released is what committed steps consumed (Counters::batches): a batch of an
// aborted step is still there, and is handed out again.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "session/session.hpp"

namespace accelmgr::session {

class BatchQueue {
 public:
  BatchQueue(const Session& session, int rank);

  // The producer's side.

  /// The slot of the next batch, or null while all slots hold batches that are not released.
  std::byte* claim() const noexcept;
  /// The claimed slot holds `elements` elements by now: a producer that takes over need not write them again.
  void fill(std::uint64_t elements) noexcept;
  std::uint64_t filling() const noexcept { return queue_->filling.load(); }
  /// Hands the claimed slot, which holds `elements` elements, to the consumer. A producer killed in here
  /// leaves the batch published, or a slot of which nothing is known to be filled: never the same elements in
  /// both.
  void publish(std::uint64_t elements) noexcept;
  /// No further batch follows; with an error, its text reaches the consumer.
  void finish(const std::string& error = {}) noexcept;
  /// Takes finish() back.
  void reopen() noexcept;
  /// Takes back all that is not released, and finish(): the next batch has the number released(). The
  /// consumer must not be reading.
  void rewind() noexcept;
  /// What was published, or is being filled, and is not released.
  const std::byte* slot(std::uint64_t number) const noexcept { return slot_of(number); }
  /// Elements of a published batch, one of the last `slots`.
  std::uint64_t elements(std::uint64_t number) const noexcept { return *elements_of(number); }

  // The consumer's side.

  struct Filled {
    const std::byte* slot;
    std::uint64_t elements;
  };
  enum class State { filled, ended, failed, empty };
  /// Whether batch `number` is there; does not block.
  State look(std::uint64_t number, Filled& out) const noexcept;
  /// Blocks until batch `number` is there, the data has ended, or `give_up()` is true (then: empty); it is
  /// asked at least every 20 ms.
  State wait(std::uint64_t number, Filled& out, int spin_us, const std::function<bool()>& give_up) const;
  std::string error() const;

  /// Batches that committed steps have consumed.
  std::uint64_t released() const noexcept;
  std::uint64_t published() const noexcept { return queue_->published.load(); }

 private:
  std::uint64_t* elements_of(std::uint64_t number) const noexcept;
  std::byte* slot_of(std::uint64_t number) const noexcept;

  const Session* session_;
  Queue* queue_;
  int rank_;
};

}  // namespace accelmgr::session
