// The data manager: reads a source and shards its elements, one after the other, over the queues of the
// ranks.
//
// All state of the loader is in the session: Sharding says which element goes to which rank, the queues hold
// the elements that were assigned, Counters says how many were consumed. So a new loader can go on where the
// old one was killed, at whatever instant:
//
//   - If the session has the sharding that the host asked for last, the slots stay as they are. An element
//     that was being written is read from the source again.
//   - If there is no sharding, an unfinished one, or one to another team or with other shares, all elements
//     that are not consumed are assigned again from the source. The same happens if a short step was not yet
//     whole, or if the data may have changed (Loading::reads_again).
//
// In each case the source first goes to the data cursor: from its state in the session, and by reading on
// from there.
//
// In the queues each step takes as many batches of a rank as its share says. Where an epoch ends within a
// step, and at the end of the data, the step is short: it gets its missing batches without elements. With
// `drop_last` there are no short steps. If the epoch may end within a step, the step's elements wait in
// memory of the loader until all are there, because a published batch cannot be taken back from a runner. If
// the epoch ends before, they are left out: they count as consumed by the step that follows.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "engine/data/counted_source.hpp"
#include "engine/data/sharding.hpp"
#include "engine/session/batch_queue.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/session.hpp"
#include "engine/session/spans.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::data {

struct Loading {
  int batch_size = 1;
  int prefetch = 0;        ///< Elements beyond a step that are loaded ahead for each rank.
  bool with_step = false;  ///< Elements of a step are read during its attempts, and not before.
  bool drop_last = true;
  bool reads_again = false;  ///< Elements that an earlier loader has read ahead are read again.
};

/// do_work() makes some progress and never waits for a queue. In production run() calls it in a thread; tests
/// call it step by step.
class Loader {
 public:
  /// Assigns as the host asks (HostControl::assignment). Does not read, so that a slow source does not hold
  /// up the caller. Throws SessionError when the host's assignment is impossible in this session or the
  /// session's state is inconsistent, and what BatchSource::restore() throws.
  /// Requires: `source` has not been read, no attempt is open, and no other loader exists.
  Loader(std::unique_ptr<BatchSource> source, const session::LoaderView& view,
         const session::Manifest& manifest, const Loading& loading);

  /// Does one of these:
  ///   - assigns one element, or reads one that waits for the others of its step;
  ///   - publishes a batch of a short step;
  ///   - reads past an element that was assigned or consumed before;
  ///   - assigns all unconsumed elements again, when the host asks for another assignment. No attempt may be
  ///     open until Sharding::follows says that this is done.
  /// Returns false when there is nothing to do: the queue of the next rank is full or far enough
  /// ahead, or the data has ended. Blocks while the source does. When the source throws, the data ends
  /// with that error.
  bool do_work();
  /// True when the source has ended or failed, and every queue of the team says so.
  bool finished() const noexcept { return finished_; }
  /// What the source is reading; nullopt if it is not reading. Any thread may call this.
  std::optional<Reading> reading() const { return source_.reading(); }
  /// Blocks and works until the session stops. Sleeps while there is nothing to do.
  void run();

  /// The number of the element that is assigned next, over all restarts.
  std::uint64_t assigned() const noexcept { return next_; }
  /// Elements at the end of the data and of epochs that were left out (`drop_last`).
  std::uint64_t dropped() const noexcept { return dropped_; }

 private:
  /// An element in memory of the loader.
  struct Held {
    std::uint64_t number;
    std::vector<std::byte> bytes;
  };
  /// What the queues hold of a step.
  struct StepInQueues {
    std::vector<std::uint64_t> rows;  ///< Elements of each rank of the team, in ascending order of ranks.
    std::uint64_t elements = 0;       ///< Elements of all ranks.
    std::uint64_t left_out = 0;       ///< Elements of the source that were left out before it.
    bool whole = true;                ///< All batches of all ranks are published.
    bool is_short = false;            ///< A published batch is short.
  };

  // Beginning, and beginning again.
  void check(const session::Assignment& to) const;
  bool go_on(const session::Assignment& to);
  void begin(const session::Assignment& to, std::uint64_t first_element);
  void reshard(const session::Assignment& to);
  /// Whether the host asks for another assignment than there is.
  bool asked_again();

  bool assign();
  /// Whether the source has yet to give elements that were assigned or consumed before.
  bool behind() const noexcept;
  /// Whether the rank has room for a batch more, which may be read now.
  bool has_room(int rank) const;
  /// Whether an attempt is under way that takes elements from the source.
  bool attempt_reads() const noexcept;
  /// Begins a step; or, if elements must be read or left out first, does one of these instead.
  bool begin_step();
  void hold_next();
  void leave_out(std::size_t held);
  DataError too_few(std::uint64_t elements) const;
  bool write(const Place& at, const std::vector<std::span<std::byte>>& rows);
  void pass_assigned();
  /// Checks the result of reading the source. Returns `read`; notes the end of the data or of an epoch.
  /// Throws DataError when the source ended sooner than before.
  bool is_element(bool read);
  /// Whether an epoch has ended, or the data, within the step that is being assigned.
  bool step_ends_short() const;
  bool publish_short_step();
  void end_step();
  void finish();
  void enter(session::Activity activity) noexcept;

  session::RankMask team() const noexcept { return session_->sharding().assigned_to.load(); }
  Place place(std::uint64_t element) const noexcept;
  /// The number of the first batch of `rank` in a step of this sharding.
  std::uint64_t first_batch(int rank, std::uint64_t step) const noexcept;
  /// The first step of this sharding that is not consumed.
  std::uint64_t unconsumed_step() const noexcept;
  StepInQueues in_queues(std::uint64_t step) const;
  /// How many elements of the step that is being assigned the queue of `rank` holds.
  std::uint64_t rows(int rank) const noexcept;
  std::vector<std::span<std::byte>> rows_at(std::byte* slot, std::uint64_t position) const;
  std::deque<Held> unconsumed() const;

  CountedSource source_;
  session::LoaderView view_;
  session::ActivityWriter activities_;
  const session::Session* session_;
  std::vector<session::FieldEntry> fields_;
  std::vector<session::BatchQueueWriter> queues_;
  RoundRobin order_;
  std::uint64_t batch_size_;
  std::uint64_t ahead_;  ///< Batches beyond a step that are loaded ahead for each rank.
  bool drop_last_, with_step_;
  std::uint64_t next_ = 0;        ///< The element to be assigned next.
  std::uint64_t step_ = 0;        ///< The step that it is assigned to, counted in this sharding.
  std::uint64_t step_first_ = 0;  ///< The first element of that step.
  std::uint64_t known_end_ = 0;   ///< The source gave all elements before this one to an earlier loader.
  std::deque<Held> backlog_;  ///< Elements from `next_` on that were taken back from the queues, or wait for
                              ///< others of their step; assigned before the source is read on.
  std::set<std::uint64_t>
      ends_;  ///< Epochs end before these elements. Those that are consumed are forgotten.
  std::optional<std::string> over_;  ///< Set when the source has ended; not empty: it failed with this error.
  bool finished_ = false;
  std::uint64_t dropped_ = 0;
};

/// The fields of a batch as the manifest lists them, with offsets still 0.
std::vector<session::FieldEntry> field_entries(std::span<const FieldSpec> fields);

}  // namespace accelmgr::data
