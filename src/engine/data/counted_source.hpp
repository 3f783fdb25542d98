// A data source that counts its elements, and saves states in the session from which another process can go
// on.
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
#include "engine/data/reading.hpp"
#include "engine/session/session.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::data {

class CountedSource {
 public:
  /// Restores `source` from the state in the session; without one it stays at its beginning. Throws
  /// SessionError when that state is beyond the data cursor, and what BatchSource::restore() throws.
  /// Requires: `source` has not been read.
  CountedSource(std::unique_ptr<BatchSource> source, const session::LoaderView& view);

  std::span<const FieldSpec> fields() const { return source_->fields(); }
  /// Number of the element that is read next, counted from the source's beginning over all restarts.
  std::uint64_t number() const noexcept { return number_.load(std::memory_order_relaxed); }
  /// Reads an element into `rows`, one for each field; returns false at the end of the data or of an epoch.
  /// May block and throw as the source does. Throws DataError when the source wrote beyond a row.
  /// Requires: row_guard_bytes bytes follow each row; they are overwritten.
  bool next(const std::vector<std::span<std::byte>>& rows);
  /// Whether next() goes on after it has returned false, with another epoch.
  bool more_epochs() const { return source_->more_epochs(); }
  /// Reads an element and discards it; otherwise like next().
  bool discard();

  /// What the source is reading; nullopt if it is not reading. Any thread may call this.
  std::optional<Reading> reading() const;

  /// Keeps the source's current state, if it gives one. Throws DataError when the state is longer than a
  /// session can hold.
  void remember();
  /// Saves in the session the newest kept state at or before the data cursor. Does so only if the cursor has
  /// advanced since the last save. So a process that reads the state while no attempt is open meets at most
  /// one save, and that goes to the copy that it does not read.
  void leave_state();

 private:
  struct State {
    std::uint64_t element;
    std::string bytes;
  };

  std::unique_ptr<BatchSource> source_;
  session::LoaderView view_;
  std::atomic<std::uint64_t> number_{0};
  std::atomic<std::int64_t> reading_since_ns_{0};  ///< 0: the source is not reading.
  std::uint64_t told_ = 0;                         ///< The data cursor that the source was told.
  std::uint64_t left_at_;                          ///< The data cursor just after the last state was saved.
  std::deque<State> states_;  ///< In order of their elements; at most one for each round in the rings.
  std::vector<std::vector<std::byte>> discarded_;
};

/// The data cursor: how many elements committed attempts have consumed.
inline std::uint64_t data_cursor(const session::Session& session) noexcept {
  return session::read_counters(session, [](const auto& valid) { return std::uint64_t{valid.elements}; });
}

}  // namespace accelmgr::data
