// The data manager: reads a source and deals its elements, one after the other, into the devices' queues.
//
// What it knows lies in the session: Dealing says which element is whose, the queues hold those dealt,
// Counters how many were consumed. So another loader goes on where one was killed, at whatever instant:
//
//   - Where it finds a dealing to its own team, it goes on in the slots as they are. What was being
//     written is read from the source again.
//   - Where it finds none, one under way, or one to another team, it deals all that is not consumed
//     anew, from the source. Likewise where the last batch of a queue is short: nothing could follow
//     it, but the source may go on this time.
//
// In each case the source is first brought to the data cursor: by its state in the session, and by reading on
// from there.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/batch_source.hpp"
#include "data/counted_source.hpp"
#include "data/dealing.hpp"
#include "session/batch_queue.hpp"
#include "session/manifest.hpp"
#include "session/session.hpp"

namespace accelmgr::data {

/// An agent: do_work() makes progress and never waits for a queue; production gives it a thread (run()),
/// tests step it.
class Loader {
 public:
  /// Deals to `team` until Control::deal_to asks for another. `source` was not read yet. No attempt may be
  /// open, and no other loader may live. Does not read, so that a slow source does not hold up its caller.
  /// Throws SessionError when the team is none of the session's or its state is inconsistent, and what
  /// BatchSource::restore() throws.
  Loader(std::unique_ptr<BatchSource> source, const session::Session& session,
         const session::Manifest& manifest, int batch_size, bool drop_last, session::RankMask team);

  /// Deals one element; or reads one that was dealt or consumed before; or deals all anew that is not
  /// consumed, when Control::deal_to asks for it (no attempt may be open until Dealing::dealt_to says the
  /// same). Returns false when there is nothing to do: the queue of the device whose turn it is is full, or
  /// the data has ended.
  bool do_work();
  /// The source has ended or failed, and every queue of the team says so.
  bool finished() const noexcept { return finished_; }
  /// nullopt: the source does not read. Any thread.
  std::optional<Reading> reading() const { return source_.reading(); }
  /// Works until the session stops. Sleeps while there is nothing to do.
  void run();

  /// The number of the element that is dealt next, over all restarts.
  std::uint64_t dealt() const noexcept { return next_; }
  /// Elements that made no full batch and were left out (`drop_last`).
  std::uint64_t dropped() const noexcept { return dropped_; }

 private:
  using Bytes = std::vector<std::byte>;

  // How it begins, and begins again.
  bool can_go_on(session::RankMask team) const;
  void go_on();
  void begin(session::RankMask team, std::uint64_t first_element);
  void deal_anew(session::RankMask team);

  bool deal();
  bool write(const std::vector<std::span<std::byte>>& rows);
  /// Of a read of the source: whether it gave an element. Throws DataError when it ended sooner than before.
  bool is_element(bool read);
  void finish();

  session::RankMask team() const noexcept { return session_->dealing().dealt_to.load(); }
  Place place(std::uint64_t element) const noexcept;
  /// Elements of this dealing that the queue of `rank` was given.
  std::uint64_t rows(int rank) const noexcept;
  std::vector<std::span<std::byte>> rows_at(std::byte* slot, std::uint64_t position) const;
  Bytes dealt_element(std::uint64_t element) const;

  CountedSource source_;
  const session::Session* session_;
  std::vector<session::FieldEntry> fields_;
  std::vector<session::BatchQueue> queues_;
  std::uint64_t batch_size_;
  bool drop_last_;
  std::uint64_t next_ = 0;           ///< The element to be dealt next.
  std::uint64_t known_end_ = 0;      ///< The source gave all before this one to another loader.
  std::deque<Bytes> backlog_;        ///< From `next_` on, before the source goes on: read, dealt, taken back.
  std::optional<std::string> over_;  ///< The source has ended, or failed: with this error.
  bool finished_ = false;
  std::uint64_t dropped_ = 0;
};

/// The fields of a batch as the manifest lists them; not yet placed.
std::vector<session::FieldEntry> field_entries(std::span<const FieldSpec> fields);

}  // namespace accelmgr::data
