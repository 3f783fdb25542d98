#include "data/loader.hpp"

#include <fmt/format.h>

#include <cstring>
#include <iterator>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "ipc/epoch.hpp"
#include "tensor/exception_text.hpp"

namespace accelmgr::data {
namespace {

constexpr std::int64_t wait_slice_ns = 20'000'000;

std::vector<int> ranks_of(session::RankMask team) {
  std::vector<int> ranks;
  for (std::uint64_t i = 0; i < size_of(team); ++i) ranks.push_back(rank_of(i, team));
  return ranks;
}

}  // namespace

std::vector<session::FieldEntry> field_entries(std::span<const FieldSpec> fields) {
  std::vector<session::FieldEntry> entries;
  for (const auto& f : fields)
    entries.push_back({.name = f.name,
                       .shape = f.shape,
                       .dtype = static_cast<std::int32_t>(f.dtype),
                       .offset = 0,
                       .element_bytes = f.bytes()});
  return entries;
}

Loader::Loader(std::unique_ptr<BatchSource> source, const session::Session& session,
               const session::Manifest& manifest, int batch_size, bool drop_last, session::RankMask team)
    : source_(std::move(source), session),
      session_(&session),
      fields_(manifest.fields),
      batch_size_(static_cast<std::uint64_t>(batch_size)),
      drop_last_(drop_last) {
  if (team == 0 || (team & ~session::all_ranks(session.ranks())) != 0)
    throw SessionError(fmt::format("elements cannot be dealt to the ranks of mask {:#x}: the session has {}",
                                   team, session.ranks()));
  for (int rank = 0; rank < session.ranks(); ++rank) queues_.emplace_back(session, rank);
  known_end_ = data_cursor(session);
  if (can_go_on(team)) {
    go_on();
  } else {
    begin(team, known_end_);
  }
}

bool Loader::can_go_on(session::RankMask team) const {
  if (this->team() != team) return false;
  for (const int rank : ranks_of(team)) {
    const auto& queue = queues_[static_cast<std::size_t>(rank)];
    const auto published = queue.published();
    if (published > session_->dealing().first_batch[rank] && queue.elements(published - 1) < batch_size_)
      return false;
  }
  return true;
}

void Loader::go_on() {
  std::vector<std::uint64_t> held;
  for (const int rank : ranks_of(team())) {
    queues_[static_cast<std::size_t>(rank)].reopen();
    held.push_back(rows(rank));
  }
  // A loader killed while it published a batch leaves a rank without it, and later elements with the others.
  const auto first = session_->dealing().first_element;
  next_ = first + first_missing(held);
  known_end_ = std::max(known_end_, first + end_of(held));
}

void Loader::begin(session::RankMask team, std::uint64_t first_element) {
  auto& dealing = session_->dealing();
  dealing.dealt_to.store(0);
  for (int rank = 0; rank < session_->ranks(); ++rank) {
    auto& queue = queues_[static_cast<std::size_t>(rank)];
    queue.rewind();
    dealing.first_batch[rank] = queue.published();
  }
  dealing.first_element = first_element;
  next_ = first_element;
  finished_ = false;
  dropped_ = 0;
  dealing.dealt_to.store(team);
  ipc::advance(session_->control().life);
}

void Loader::deal_anew(session::RankMask team) {
  // Exact: the attempt is closed. All up to `next_` lies in the queues, in full or partly filled batches.
  const auto first = data_cursor(*session_);
  std::deque<Bytes> taken_back;
  for (auto element = first; element < next_; ++element) taken_back.push_back(dealt_element(element));
  std::move(backlog_.begin(), backlog_.end(), std::back_inserter(taken_back));
  backlog_ = std::move(taken_back);
  begin(team, first);
}

Place Loader::place(std::uint64_t element) const noexcept {
  return place_of(element - session_->dealing().first_element, team(), batch_size_);
}

std::uint64_t Loader::rows(int rank) const noexcept {
  const auto& queue = queues_[static_cast<std::size_t>(rank)];
  const auto batches = queue.published() - session_->dealing().first_batch[rank];
  return batches * batch_size_ + queue.filling();
}

std::vector<std::span<std::byte>> Loader::rows_at(std::byte* slot, std::uint64_t position) const {
  std::vector<std::span<std::byte>> rows;
  rows.reserve(fields_.size());
  for (const auto& field : fields_)
    rows.emplace_back(slot + field.offset + position * field.element_bytes, field.element_bytes);
  return rows;
}

Loader::Bytes Loader::dealt_element(std::uint64_t element) const {
  const auto at = place(element);
  const auto& queue = queues_[static_cast<std::size_t>(at.rank)];
  const auto* slot = queue.slot(session_->dealing().first_batch[at.rank] + at.batch);
  Bytes bytes;
  for (const auto& field : fields_) {
    const auto* row = slot + field.offset + at.position * field.element_bytes;
    bytes.insert(bytes.end(), row, row + field.element_bytes);
  }
  return bytes;
}

bool Loader::do_work() {
  source_.leave_state();
  const auto asked = session_->control().deal_to.load();
  if (asked != 0 && asked != team()) {
    deal_anew(asked);
    return true;
  }
  if (finished_) return false;
  try {
    return deal();
  } catch (...) {  // User code: a data source may throw anything.
    over_ = tensor::current_exception_text();
    if (session_->control().stopping.load() == 0)  // A stop kills the source's worker processes first.
      base::log().info("the data source failed after {} elements: {}", source_.number(), *over_);
    return true;
  }
}

bool Loader::deal() {
  if (backlog_.empty() && over_) {
    finish();
    return true;
  }
  const bool behind = backlog_.empty() && source_.number() < next_;
  const auto at = place(next_);
  auto& queue = queues_[static_cast<std::size_t>(at.rank)];
  const bool there = at.batch * batch_size_ + at.position < rows(at.rank);
  if (behind || there) {
    if (is_element(source_.discard()) && !behind) ++next_;
    return true;
  }
  auto* slot = queue.claim();
  if (slot == nullptr) return false;
  if (!write(rows_at(slot, at.position))) return true;
  ++next_;
  if (at.position + 1 == batch_size_) {
    queue.publish(batch_size_);
  } else {
    queue.fill(at.position + 1);
  }
  return true;
}

bool Loader::write(const std::vector<std::span<std::byte>>& rows) {
  if (backlog_.empty()) {
    const auto index = next_ - session_->dealing().first_element;
    if (index % round_elements(team(), batch_size_) == 0) source_.remember();
    return is_element(source_.next(rows));
  }
  const auto* bytes = backlog_.front().data();
  for (const auto& row : rows) {
    std::memcpy(row.data(), bytes, row.size());
    bytes += row.size();
  }
  backlog_.pop_front();
  return true;
}

bool Loader::is_element(bool read) {
  if (read) return true;
  if (source_.number() < known_end_)
    throw DataError(fmt::format(
        "the data source ended after {} elements; before it was read again it gave {}: it must give "
        "the same ones every time",
        source_.number(), known_end_));
  over_.emplace();
  return false;
}

void Loader::finish() {
  finished_ = true;
  for (const int rank : ranks_of(team())) {
    auto& queue = queues_[static_cast<std::size_t>(rank)];
    const auto elements = queue.filling();
    if (elements > 0 && !drop_last_) {
      queue.publish(elements);
    } else {
      dropped_ += elements;
    }
    queue.finish(*over_);
  }
  if (dropped_ > 0)
    base::log().info(
        "{} elements at the end of the data made no full batch and were left out (data.drop_last)", dropped_);
}

void Loader::run() {
  auto& control = session_->control();
  while (control.stopping.load() == 0) {
    const auto seen = ipc::load(control.finish);
    if (!do_work()) ipc::wait_changed(control.finish, seen, wait_slice_ns, 0);
  }
}

}  // namespace accelmgr::data
