#include "engine/data/loader.hpp"

#include <fmt/format.h>

#include <algorithm>
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
  base::log().debug("from element {} on each step takes {} elements: {}", first_element,
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
      drop_last_(loading.drop_last),
      with_step_(loading.with_step) {
  const auto& to = session_->control().assignment;
  check(to);
  for (int rank = 0; rank < session_->ranks(); ++rank) queues_.emplace_back(view, rank);
  known_end_ = data_cursor(*session_);
  if (loading.reads_again || !go_on(to)) begin(to, known_end_);
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

// Returns false if all elements must be assigned again. A short step that is not yet whole may get other
// elements this time.
bool Loader::go_on(const session::Assignment& to) {
  if (session::Assignment{team(), session_->sharding().shares} != to) return false;
  order_ = RoundRobin(to, batch_size_);
  step_first_ = data_cursor(*session_);
  auto held = in_queues(step_ = unconsumed_step());
  for (; held.whole; held = in_queues(++step_)) step_first_ += held.left_out + held.elements;
  if (held.is_short) return false;
  step_first_ += held.left_out;
  // A loader that was killed while it published a batch may leave one rank without an element while others
  // hold later ones.
  next_ = step_first_ + order_.first_missing(held.rows);
  known_end_ = std::max(known_end_, step_first_ + order_.end_of(held.rows));
  for (const int rank : ranks_of(team())) queues_[static_cast<std::size_t>(rank)].reopen();
  view_.sharding().follows.store(session_->control().assignments.load());
  return true;
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
  next_ = step_first_ = first_element;
  step_ = 0;
  finished_ = false;
  dropped_ = 0;
  log(to, first_element, batch_size_);
  sharding.assigned_to.store(to.team);
  sharding.follows.store(session_->control().assignments.load());
  view_.announce_readiness();
}

void Loader::reshard(const session::Assignment& to) {
  // The cursor is exact: no attempt is open. All elements up to `next_` are in the queues, in full or partly
  // filled batches, but for those that were left out.
  auto taken_back = unconsumed();
  std::move(backlog_.begin(), backlog_.end(), std::back_inserter(taken_back));
  backlog_ = std::move(taken_back);
  begin(to, data_cursor(*session_));
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

Place Loader::place(std::uint64_t element) const noexcept { return order_.place_of(element - step_first_); }

std::uint64_t Loader::first_batch(int rank, std::uint64_t step) const noexcept {
  const auto& sharding = session_->sharding();
  return sharding.first_batch[rank] + step * sharding.shares.of[rank];
}

std::uint64_t Loader::unconsumed_step() const noexcept {
  const auto& sharding = session_->sharding();
  const int rank = rank_of(0, team());
  const auto consumed = queues_[static_cast<std::size_t>(rank)].consumed();
  return (consumed - sharding.first_batch[rank]) / sharding.shares.of[rank];
}

Loader::StepInQueues Loader::in_queues(std::uint64_t step) const {
  StepInQueues found;
  for (const int rank : ranks_of(team())) {
    const auto& queue = queues_[static_cast<std::size_t>(rank)];
    const auto first = first_batch(rank, step), end = first_batch(rank, step + 1);
    const auto published = queue.published();
    std::uint64_t rows = first <= published && published < end ? queue.filling() : 0;
    for (auto batch = first; batch < std::min(end, published); ++batch) {
      rows += queue.elements(batch);
      found.is_short = found.is_short || queue.elements(batch) < batch_size_;
    }
    if (found.rows.empty()) found.left_out = queue.left_out(first);
    found.rows.push_back(rows);
    found.elements += rows;
    found.whole = found.whole && published >= end;
  }
  return found;
}

std::uint64_t Loader::rows(int rank) const noexcept {
  const auto& queue = queues_[static_cast<std::size_t>(rank)];
  return (queue.published() - first_batch(rank, step_)) * batch_size_ + queue.filling();
}

std::vector<std::span<std::byte>> Loader::rows_at(std::byte* slot, std::uint64_t position) const {
  std::vector<std::span<std::byte>> rows;
  rows.reserve(fields_.size());
  for (const auto& field : fields_)
    rows.emplace_back(slot + field.offset + position * field.element_bytes, field.element_bytes);
  return rows;
}

std::deque<Loader::Held> Loader::unconsumed() const {
  std::deque<Held> elements;
  auto number = data_cursor(*session_);
  for (auto step = unconsumed_step(); step <= step_; ++step) {
    const auto held = in_queues(step);
    number += held.left_out;
    for (std::uint64_t index = 0; index < held.elements; ++index, ++number) {
      const auto at = order_.place_of(index);
      const auto* slot =
          queues_[static_cast<std::size_t>(at.rank)].slot(first_batch(at.rank, step) + at.batch);
      auto& bytes = elements.emplace_back(Held{number, {}}).bytes;
      for (const auto& field : fields_) {
        const auto* row = slot + field.offset + at.position * field.element_bytes;
        bytes.insert(bytes.end(), row, row + field.element_bytes);
      }
    }
  }
  return elements;
}

bool Loader::do_work() {
  source_.leave_state();
  // A source that was restored is read up to `next_` first: only then it is known where epochs end.
  if (!behind() && asked_again()) {
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
  if (step_ends_short()) return publish_short_step();
  if (backlog_.empty() && over_) {
    finish();
    return true;
  }
  if (behind()) {
    enter(Activity::read);
    is_element(source_.discard());
    return true;
  }
  const auto at = place(next_);
  const bool there = at.batch * batch_size_ + at.position < rows(at.rank);
  if (!there && !has_room(at.rank)) return false;
  enter(Activity::read);
  if (there) {
    pass_assigned();
    return true;
  }
  if (next_ == step_first_ && !begin_step()) return true;
  auto& queue = queues_[static_cast<std::size_t>(at.rank)];
  if (!write(at, rows_at(queue.claim(), at.position))) return true;
  ++next_;
  if (at.position + 1 == batch_size_) {
    queue.publish(batch_size_);
    enter(Activity::none);  // Each batch gets a span of its own.
  } else {
    queue.fill(at.position + 1);
  }
  if (next_ - step_first_ == order_.step_elements()) end_step();
  return true;
}

bool Loader::behind() const noexcept { return backlog_.empty() && !over_ && source_.number() < next_; }

// A queue has slots for the largest share; one with a smaller share must not be filled further ahead.
bool Loader::has_room(int rank) const {
  const auto& queue = queues_[static_cast<std::size_t>(rank)];
  return queue.claim() != nullptr &&
         queue.published() - queue.consumed() < session_->sharding().shares.of[rank] + ahead_ &&
         (!with_step_ || attempt_reads());
}

// The host writes a request only while the word is closed: one that is read between two looks at the same
// open attempt is whole.
bool Loader::attempt_reads() const noexcept {
  const auto before = session_->word();
  const auto& request = session_->control().request;
  const bool reads = request.repeat == 0 && before.computing(request.participants);
  const auto after = session_->word();
  return reads && after.attempt == before.attempt && !after.closed;
}

bool Loader::begin_step() {
  const auto first = backlog_.empty() ? source_.number() : backlog_.front().number;
  if (drop_last_) {
    const auto end = ends_.upper_bound(first);
    const auto beyond = std::ranges::find_if(
        backlog_, [&](const Held& held) { return end != ends_.end() && held.number >= *end; });
    const auto held = static_cast<std::size_t>(beyond - backlog_.begin());
    if (held < order_.step_elements()) {
      if (end != ends_.end()) {
        leave_out(held);
        return false;
      }
      if (!over_ && source_.more_epochs()) {
        hold_next();
        return false;
      }
    }
  }
  if (first > next_) {
    queues_[static_cast<std::size_t>(rank_of(0, team()))].leave_out(first - next_);
    next_ = step_first_ = first;
  }
  return true;
}

void Loader::hold_next() {
  if (backlog_.empty()) source_.remember();
  Held held{source_.number(), {}};
  std::vector<std::span<std::byte>> rows;
  std::size_t bytes = 0;
  for (const auto& field : fields_) bytes += field.element_bytes + session::row_guard_bytes;
  held.bytes.resize(bytes);
  bytes = 0;
  for (const auto& field : fields_) {
    rows.push_back(std::span(held.bytes).subspan(bytes, field.element_bytes));
    bytes += field.element_bytes + session::row_guard_bytes;
  }
  if (!is_element(source_.next(rows))) return;
  auto* to = held.bytes.data();
  for (const auto& row : rows) to = std::move(row.begin(), row.end(), to);  // Without the guards.
  backlog_.push_back(std::move(held));
}

void Loader::leave_out(std::size_t held) {
  dropped_ += held;
  backlog_.erase(backlog_.begin(), backlog_.begin() + static_cast<std::ptrdiff_t>(held));
  if (step_ == 0 && data_cursor(*session_) == 0) throw too_few(held);
}

DataError Loader::too_few(std::uint64_t elements) const {
  const auto whole = order_.step_elements();
  return DataError(fmt::format(
      "{} elements make no step: a step takes {} (batches: {}, of {} elements each), and data.drop_last "
      "leaves "
      "the rest of the data and of each epoch out. Set data.drop_last to false, or make batches smaller "
      "(batch_size_per_device)",
      elements, whole, whole / batch_size_, batch_size_));
}

void Loader::pass_assigned() {
  if (!backlog_.empty()) {
    backlog_.pop_front();
  } else if (!is_element(source_.discard())) {
    return;
  }
  if (++next_ - step_first_ == order_.step_elements()) end_step();
}

bool Loader::write(const Place& at, const std::vector<std::span<std::byte>>& rows) {
  if (backlog_.empty()) {
    if (order_.begins_round(at)) source_.remember();
    return is_element(source_.next(rows));
  }
  const auto* bytes = backlog_.front().bytes.data();
  for (const auto& row : rows) {
    std::memcpy(row.data(), bytes, row.size());
    bytes += row.size();
  }
  backlog_.pop_front();
  return true;
}

bool Loader::is_element(bool read) {
  if (read) return true;
  if (source_.more_epochs()) {
    ends_.insert(source_.number());
    return false;
  }
  if (source_.number() < known_end_)
    throw DataError(fmt::format(
        "the data source ended after {} elements, but the first time it gave {}: it must give the same "
        "elements every time",
        source_.number(), known_end_));
  over_.emplace();
  return false;
}

bool Loader::step_ends_short() const {
  if (next_ == step_first_) return false;
  return ends_.contains(next_) || (!drop_last_ && backlog_.empty() && over_ && over_->empty());
}

bool Loader::publish_short_step() {
  bool whole = true;
  for (const int rank : ranks_of(team())) {
    auto& queue = queues_[static_cast<std::size_t>(rank)];
    if (queue.published() == first_batch(rank, step_ + 1)) continue;
    whole = false;
    if (queue.claim() == nullptr) continue;
    queue.publish(queue.filling());
    return true;
  }
  if (whole) end_step();
  return whole;
}

void Loader::end_step() {
  step_first_ = next_;
  ++step_;
  ends_.erase(ends_.begin(), ends_.upper_bound(data_cursor(*session_)));
}

void Loader::finish() {
  finished_ = true;
  if (over_->empty() && step_ == 0 && next_ > 0 && data_cursor(*session_) == 0) over_ = too_few(next_).what();
  for (const int rank : ranks_of(team())) {
    auto& queue = queues_[static_cast<std::size_t>(rank)];
    dropped_ += queue.filling();
    queue.finish(*over_);
  }
  if (dropped_ > 0 && over_->empty())
    base::log().info(
        "{} elements at the end of the data, or of epochs, did not fill a batch and were left out "
        "(data.drop_last)",
        dropped_);
}

// Reads the clock only at a change, because there are many elements.
void Loader::enter(Activity activity) noexcept {
  if (activity != activities_.activity()) activities_.enter(activity, base::now_ns());
}

void Loader::run() {
  const auto& control = session_->control();
  while (control.stopping.load() == 0) {
    // An attempt advances `trigger` when it begins, and `finish` when it ends.
    const auto& change = with_step_ && !attempt_reads() ? control.trigger : control.finish;
    const auto seen = ipc::load(change);
    if (do_work()) continue;
    enter(Activity::waiting);
    ipc::wait_changed(change, seen, timing::look_ns, 0);
  }
}

}  // namespace accelmgr::data
