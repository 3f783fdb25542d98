#include "engine/data/counted_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/fault_point.hpp"
#include "base/unmovable.hpp"

namespace accelmgr::data {

namespace {

constexpr auto guard_byte = std::byte{0xa5};

void mark_guards(const std::vector<std::span<std::byte>>& rows) {
  for (const auto& row : rows) std::fill_n(row.data() + row.size(), session::row_guard_bytes, guard_byte);
}

void check_guards(const std::vector<std::span<std::byte>>& rows, std::span<const FieldSpec> fields,
                  std::uint64_t number) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto* guard = rows[i].data() + rows[i].size();
    if (std::all_of(guard, guard + session::row_guard_bytes, [](std::byte b) { return b == guard_byte; }))
      continue;
    throw DataError(fmt::format(
        "the data source wrote past the end of the row of field '{}', which has {} bytes, in element "
        "{}: batches may be damaged; it must write only into the span that ElementWriter::bytes() returns",
        fields[i].name, rows[i].size(), number));
  }
}

/// Stores the time at which something began, and 0 when it has ended.
class Within : base::Unmovable {
 public:
  explicit Within(std::atomic<std::int64_t>& since_ns) : since_ns_(since_ns) {
    since_ns_.store(base::now_ns(), std::memory_order_release);
  }
  ~Within() { since_ns_.store(0, std::memory_order_release); }

 private:
  std::atomic<std::int64_t>& since_ns_;
};

}  // namespace

static_assert(BatchSource::max_state_bytes == session::source_state_bytes);

CountedSource::CountedSource(std::unique_ptr<BatchSource> source, const session::LoaderView& view)
    : source_(std::move(source)), view_(view), left_at_(data_cursor(view.session())) {
  const auto& left = view.session().source_state();
  if (left.bytes == 0) return;
  if (left.element > left_at_)
    throw SessionError(fmt::format(
        "the session's state of the data source ({} bytes, of element {}) is damaged: its element "
        "lies after the data cursor, {}",
        left.bytes, left.element, left_at_));
  source_->restore({left.state, left.bytes});
  number_.store(left.element);
}

bool CountedSource::next(const std::vector<std::span<std::byte>>& rows) {
  base::fault_point(base::FaultPhase::data);
  mark_guards(rows);
  ElementWriter element(source_->fields(), rows);
  bool read = false;
  {
    const Within within(reading_since_ns_);
    read = source_->next(element);
  }
  check_guards(rows, source_->fields(), number());
  if (read) number_.store(number() + 1, std::memory_order_relaxed);
  return read;
}

std::optional<Reading> CountedSource::reading() const {
  const auto since_ns = reading_since_ns_.load(std::memory_order_acquire);
  if (since_ns == 0) return std::nullopt;
  return Reading{source_->reading(number()), number(), since_ns};
}

bool CountedSource::discard() {
  if (discarded_.empty())
    for (const auto& field : fields()) discarded_.emplace_back(field.bytes() + session::row_guard_bytes);
  std::vector<std::span<std::byte>> rows;
  for (auto& row : discarded_) rows.push_back(std::span(row).first(row.size() - session::row_guard_bytes));
  return next(rows);
}

void CountedSource::remember() {
  const auto number = this->number();
  if (!states_.empty() && states_.back().element == number) states_.pop_back();  // An epoch has ended since.
  auto state = source_->state();
  if (!state || state->empty()) return;
  if (state->size() > BatchSource::max_state_bytes)
    throw DataError(fmt::format("the data source's state at element {} has {} bytes; at most {} can be kept",
                                number, state->size(), BatchSource::max_state_bytes));
  states_.push_back({number, std::move(*state)});
}

void CountedSource::leave_state() {
  const auto [cursor, last] = session::read_counters(view_.session(), [](const auto& valid) {
    return std::pair<std::uint64_t, std::uint64_t>{valid.elements, valid.last_elements};
  });
  const auto kept = view_.session().header().keeps_last_step != 0 ? last : 0;
  if (cursor - kept != told_) source_->consumed(told_ = cursor - kept);
  if (cursor == left_at_ || states_.empty() || states_.front().element > cursor) return;
  while (states_.size() > 1 && states_[1].element <= cursor) states_.pop_front();
  auto& sharding = view_.sharding();
  const auto other = sharding.source_index.load(std::memory_order_relaxed) ^ 1;
  auto& copy = sharding.source[other];
  copy.element = states_.front().element;
  copy.bytes = states_.front().bytes.size();
  std::memcpy(copy.state, states_.front().bytes.data(), copy.bytes);
  sharding.source_index.store(other, std::memory_order_release);
  states_.pop_front();
  left_at_ = data_cursor(view_.session());
}

}  // namespace accelmgr::data
