#include "engine/data/loader.hpp"

#include <fmt/format.h>

#include <cstring>
#include <iterator>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/exception_text.hpp"
#include "base/ipc/epoch.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"

namespace accelmgr::data {

using session::Activity;

namespace {

std::vector<int> ranks_of(session::RankMask team) {
  std::vector<int> ranks;
  for (std::uint64_t i = 0; i < size_of(team); ++i) ranks.push_back(rank_of(i, team));
  return ranks;
}

/// Says who gets which elements. They go to the ranks in turn, step by step (sharding.hpp).
void log(const session::Assignment& to, std::uint64_t first_element, std::uint64_t batch_size) {
  std::string ranks;
  for (const int rank : ranks_of(to.team))
    ranks +=
        fmt::format("{}rank {} gets {}", ranks.empty() ? "" : ", ", rank, to.shares.of[rank] * batch_size);
  base::log().debug("from element {} on, of the next {} elements in each step {}", first_element,
                    session::total_of(to.shares, to.team) * batch_size, ranks);
}

}  // namespace

std::vector<session::FieldEntry> field_entries(std::span<const FieldSpec> fields) {
  std::vector<session::FieldEntry> entries;
  for (const auto& f : fields)
    entries.push_back(
        {.name = f.name, .shape = f.shape, .dtype = f.dtype, .offset = 0, .element_bytes = f.bytes()});
  return entries;
}

Loader::Loader(std::unique_ptr<BatchSource> source, const session::LoaderView& view,
               const session::Manifest& manifest, const Loading& loading)
    : source_(std::move(source), view),
      view_(view),
      activities_(view.spans()),
      session_(&view.session()),
      fields_(manifest.fields),
      batch_size_(static_cast<std::uint64_t>(loading.batch_size)),
      ahead_(batches_ahead(loading.prefetch, loading.batch_size)),
      drop_last_(loading.drop_last) {
  const auto& to = session_->control().assignment;
  check(to);
  for (int rank = 0; rank < session_->ranks(); ++rank) queues_.emplace_back(view, rank);
  known_end_ = data_cursor(*session_);
  if (can_go_on(to)) {
    go_on();
  } else {
    begin(to, known_end_);
  }
}

void Loader::check(const session::Assignment& to) const {
  const int ranks = session_->ranks();
  if (to.team == 0 || (to.team & ~session::all_ranks(ranks)) != 0)
    throw SessionError(fmt::format(
        "elements cannot be assigned to the ranks of mask {:#x}: the session has {} ranks", to.team, ranks));
  const auto slots = session_->header().slots;
  for (const int rank : ranks_of(to.team))
    if (const auto share = to.shares.of[rank]; share == 0 || share > slots)
      throw SessionError(fmt::format(
          "rank {} cannot compute {} micro-batches in a step: its queue has {} slots, and it must "
          "compute at least one",
          rank, share, slots));
}

bool Loader::can_go_on(const session::Assignment& to) const {
  const auto& sharding = session_->sharding();
  if (sharding.assigned_to.load() != to.team || sharding.shares != to.shares) return false;
  const RoundRobin order(to, batch_size_);
  // After a short step ranks with unequal shares would begin the next one in the middle of another.
  if (!order.even() && (data_cursor(*session_) - sharding.first_element) % order.step_elements() != 0)
    return false;
  for (const int rank : ranks_of(to.team)) {
    const auto& queue = queues_[static_cast<std::size_t>(rank)];
    const auto published = queue.published();
    if (published > sharding.first_batch[rank] && queue.elements(published - 1) < batch_size_) return false;
  }
  return true;
}

void Loader::go_on() {
  order_ = RoundRobin({team(), session_->sharding().shares}, batch_size_);
  std::vector<std::uint64_t> held;
  for (const int rank : ranks_of(team())) {
    queues_[static_cast<std::size_t>(rank)].reopen();
    held.push_back(rows(rank));
  }
  // A loader that was killed while it published a batch may leave one rank without an element while others
  // hold later ones.
  const auto first = session_->sharding().first_element;
  next_ = first + order_.first_missing(held);
  known_end_ = std::max(known_end_, first + order_.end_of(held));
  view_.sharding().follows.store(session_->control().assignments.load());
}

void Loader::begin(const session::Assignment& to, std::uint64_t first_element) {
  auto& sharding = view_.sharding();
  sharding.assigned_to.store(0);
  for (int rank = 0; rank < session_->ranks(); ++rank) {
    auto& queue = queues_[static_cast<std::size_t>(rank)];
    queue.rewind();
    sharding.first_batch[rank] = queue.published();
  }
  sharding.first_element = first_element;
  sharding.shares = to.shares;
  order_ = RoundRobin(to, batch_size_);
  next_ = first_element;
  finished_ = false;
  dropped_ = 0;
  log(to, first_element, batch_size_);
  sharding.assigned_to.store(to.team);
  sharding.follows.store(session_->control().assignments.load());
  view_.announce_readiness();
}

void Loader::reshard(const session::Assignment& to) {
  // The cursor is exact: no attempt is open. All elements up to `next_` are in the queues, in full or partly
  // filled batches.
  const auto first = data_cursor(*session_);
  std::deque<Bytes> taken_back;
  for (auto element = first; element < next_; ++element) taken_back.push_back(assigned_element(element));
  std::move(backlog_.begin(), backlog_.end(), std::back_inserter(taken_back));
  backlog_ = std::move(taken_back);
  begin(to, first);
}

bool Loader::asked_again() {
  const auto& control = session_->control();
  const auto number = control.assignments.load();
  auto& sharding = view_.sharding();
  if (number == sharding.follows.load()) return false;
  if (control.assignment != session::Assignment{team(), sharding.shares}) return true;
  sharding.follows.store(number);
  view_.announce_readiness();
  return false;
}

Place Loader::place(std::uint64_t element) const noexcept {
  return order_.place_of(element - session_->sharding().first_element);
}

std::uint64_t Loader::rows(int rank) const noexcept {
  const auto& queue = queues_[static_cast<std::size_t>(rank)];
  const auto batches = queue.published() - session_->sharding().first_batch[rank];
  return batches * batch_size_ + queue.filling();
}

std::vector<std::span<std::byte>> Loader::rows_at(std::byte* slot, std::uint64_t position) const {
  std::vector<std::span<std::byte>> rows;
  rows.reserve(fields_.size());
  for (const auto& field : fields_)
    rows.emplace_back(slot + field.offset + position * field.element_bytes, field.element_bytes);
  return rows;
}

Loader::Bytes Loader::assigned_element(std::uint64_t element) const {
  const auto at = place(element);
  const auto& queue = queues_[static_cast<std::size_t>(at.rank)];
  const auto* slot = queue.slot(session_->sharding().first_batch[at.rank] + at.batch);
  Bytes bytes;
  for (const auto& field : fields_) {
    const auto* row = slot + field.offset + at.position * field.element_bytes;
    bytes.insert(bytes.end(), row, row + field.element_bytes);
  }
  return bytes;
}

bool Loader::do_work() {
  source_.leave_state();
  if (asked_again()) {
    reshard(session_->control().assignment);
    return true;
  }
  if (finished_) return false;
  try {
    return assign();
  } catch (...) {  // User code: a data source may throw anything.
    over_ = base::current_exception_text();
    if (session_->control().stopping.load() == 0)  // A stop kills the source's worker processes first.
      base::log().info("the data source failed after {} elements: {}", source_.number(), *over_);
    return true;
  }
}

bool Loader::assign() {
  if (backlog_.empty() && over_) {
    finish();
    return true;
  }
  const bool behind = backlog_.empty() && source_.number() < next_;
  const auto at = place(next_);
  auto& queue = queues_[static_cast<std::size_t>(at.rank)];
  const bool there = at.batch * batch_size_ + at.position < rows(at.rank);
  if (behind || there) {
    enter(Activity::read);
    if (is_element(source_.discard()) && !behind) ++next_;
    return true;
  }
  auto* slot = queue.claim();
  if (slot == nullptr) return false;
  // A queue has slots for the largest share; one with a smaller share must not be filled further ahead.
  const auto share = session_->sharding().shares.of[at.rank];
  if (queue.published() - queue.consumed() >= share + ahead_) return false;
  enter(Activity::read);
  if (!write(at, rows_at(slot, at.position))) return true;
  ++next_;
  if (at.position + 1 == batch_size_) {
    queue.publish(batch_size_);
    enter(Activity::none);  // A span for each batch.
  } else {
    queue.fill(at.position + 1);
  }
  return true;
}

bool Loader::write(const Place& at, const std::vector<std::span<std::byte>>& rows) {
  if (backlog_.empty()) {
    if (order_.begins_round(at)) source_.remember();
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
        "the data source ended after {} elements, but the first time it gave {}: it must give the same "
        "elements every time",
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
        "{} elements at the end of the data did not fill a batch and were left out (data.drop_last)",
        dropped_);
}

// Only a change is worth a look at the clock: there are many elements.
void Loader::enter(Activity activity) noexcept {
  if (activity != activities_.activity()) activities_.enter(activity, base::now_ns());
}

void Loader::run() {
  const auto& control = session_->control();
  while (control.stopping.load() == 0) {
    const auto seen = ipc::load(control.finish);
    if (do_work()) continue;
    enter(Activity::waiting);
    ipc::wait_changed(control.finish, seen, timing::look_ns, 0);
  }
}

}  // namespace accelmgr::data
