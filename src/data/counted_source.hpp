// A source that knows the number of its next element, and leaves in the session from where another can go on.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/batch_source.hpp"
#include "data/reading.hpp"
#include "session/session.hpp"

namespace accelmgr::data {

class CountedSource {
 public:
  /// `source` was not read yet; it is restored from the state in the session, or stands at its beginning if
  /// there is none. Throws SessionError when that state is beyond the data cursor, and what
  /// BatchSource::restore() throws.
  CountedSource(std::unique_ptr<BatchSource> source, const session::Session& session);

  std::span<const FieldSpec> fields() const { return source_->fields(); }
  /// Of the element that is read next, counted from the source's beginning over all restarts.
  std::uint64_t number() const noexcept { return number_.load(std::memory_order_relaxed); }
  /// Reads an element; false at the end of the data. Throws what the source throws, and may block as it does;
  /// DataError when it wrote behind a row. Behind each there are row_guard_bytes, which are overwritten.
  bool next(const std::vector<std::span<std::byte>>& rows);
  /// Likewise, for an element that nobody needs.
  bool discard();

  /// nullopt: the source does not read. Any thread.
  std::optional<Reading> reading() const;

  /// Takes the source's state, if it gives one. Throws DataError when that is longer than a session can keep.
  void remember();
  /// Leaves the newest state that lies at or before the data cursor in the session. Only if the cursor has
  /// advanced since the last one was left: who reads the state while no attempt is open meets one change at
  /// most, and that is in the copy that it does not read.
  void leave_state();

 private:
  struct State {
    std::uint64_t element;
    std::string bytes;
  };

  std::unique_ptr<BatchSource> source_;
  const session::Session* session_;
  const ReadsAs* reads_as_;  ///< The source, if it describes its reads itself; else null.
  std::atomic<std::uint64_t> number_{0};
  std::atomic<std::int64_t> reading_since_ns_{0};  ///< 0: it does not read.
  std::uint64_t left_at_;     ///< The data cursor as it was after the last state was left.
  std::deque<State> states_;  ///< In order of their elements; at most one for each round in the rings.
  std::vector<std::vector<std::byte>> discarded_;
};

/// The data cursor: elements that committed attempts have consumed. Exact while no attempt is open. Otherwise
/// the copy may be rewritten while it is read; but only a committed attempt writes it, which will be closed
/// whoever dies, so that the number is right or will be in a moment.
inline std::uint64_t data_cursor(const session::Session& session) noexcept {
  return session.counters(session.word().index).elements;
}

}  // namespace accelmgr::data
