#include "session/batch_queue.hpp"

#include <cstring>

namespace accelmgr::session {
namespace {

constexpr std::int64_t wait_slice_ns = 20'000'000;
constexpr auto no_end = ~std::uint64_t{0};

}  // namespace

BatchQueue::BatchQueue(const Session& session, int rank)
    : session_(&session), queue_(&session.queue(rank)), rank_(rank) {}

std::uint64_t* BatchQueue::elements_of(std::uint64_t number) const noexcept {
  auto* counts = reinterpret_cast<std::uint64_t*>(queue_ + 1);
  return counts + number % session_->header().slots;
}

std::byte* BatchQueue::slot_of(std::uint64_t number) const noexcept {
  const auto& header = session_->header();
  auto* slots = reinterpret_cast<std::byte*>(queue_ + 1) +
                align_up(header.slots * sizeof(std::uint64_t), region_alignment);
  return slots + number % header.slots * header.slot_bytes;
}

std::uint64_t BatchQueue::released() const noexcept {
  // A reader between two closings may see the copy of either index; an older one only makes it wait longer.
  return session_->counters(session_->word().index).batches[rank_];
}

std::byte* BatchQueue::claim() const noexcept {
  const auto number = queue_->published.load(std::memory_order_relaxed);
  return number - released() < session_->header().slots ? slot_of(number) : nullptr;
}

void BatchQueue::fill(std::uint64_t elements) noexcept {
  queue_->filling.store(elements, std::memory_order_release);
}

void BatchQueue::publish(std::uint64_t elements) noexcept {
  const auto number = queue_->published.load(std::memory_order_relaxed);
  *elements_of(number) = elements;
  // In this order: one killed in between leaves elements to be read from the source again. The other order
  // would leave them in a published batch and, for who takes over, in the slot after it.
  queue_->filling.store(0, std::memory_order_release);
  queue_->published.store(number + 1, std::memory_order_release);
  ipc::advance(queue_->filled);
}

void BatchQueue::finish(const std::string& error) noexcept {
  const auto length = std::min(error.size(), text_bytes - 1);
  std::memcpy(queue_->error, error.data(), length);
  queue_->error[length] = 0;
  queue_->failed.store(error.empty() ? 0 : 1);
  queue_->end.store(queue_->published.load());
  ipc::advance(queue_->filled);
}

void BatchQueue::reopen() noexcept {
  queue_->end.store(no_end);
  queue_->failed.store(0);
}

void BatchQueue::rewind() noexcept {
  queue_->filling.store(0);
  queue_->published.store(released());
  reopen();
}

BatchQueue::State BatchQueue::look(std::uint64_t number, Filled& out) const noexcept {
  if (number < queue_->published.load(std::memory_order_acquire)) {
    out = {slot_of(number), *elements_of(number)};
    return State::filled;
  }
  if (number < queue_->end.load()) return State::empty;
  return queue_->failed.load() != 0 ? State::failed : State::ended;
}

BatchQueue::State BatchQueue::wait(std::uint64_t number, Filled& out, int spin_us,
                                   const std::function<bool()>& give_up) const {
  for (;;) {
    const auto seen = ipc::load(queue_->filled);
    const auto state = look(number, out);
    if (state != State::empty || give_up()) return state;
    ipc::wait_changed(queue_->filled, seen, wait_slice_ns, spin_us);
  }
}

std::string BatchQueue::error() const { return queue_->error; }

}  // namespace accelmgr::session
