#include "engine/session/batch_queue.hpp"

#include <fmt/format.h>

#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/timing.hpp"

namespace accelmgr::session {
namespace {

constexpr auto no_end = ~std::uint64_t{0};

/// The two counts of a batch share a word, so that both change at once: its elements, and the elements left
/// out before it.
constexpr int left_out_bit = 32;
constexpr std::uint64_t elements_mask = (std::uint64_t{1} << left_out_bit) - 1;

/// How Queue::left_out names a batch: its number plus one. Zeros: no batch.
constexpr std::uint64_t key_of(std::uint64_t number) { return (number + 1) & elements_mask; }

}  // namespace

BatchQueue::BatchQueue(const Session& session, int rank)
    : session_(&session), queue_(&session.queue(rank)), rank_(rank) {}

std::uint64_t BatchQueue::count_at(std::uint64_t number) const noexcept {
  return sizeof(Queue) + number % session_->header().slots * sizeof(std::uint64_t);
}

std::uint64_t BatchQueue::slot_at(std::uint64_t number) const noexcept {
  const auto& header = session_->header();
  return sizeof(Queue) + align_up(header.slots * sizeof(std::uint64_t), region_alignment) +
         number % header.slots * header.slot_bytes;
}

std::uint64_t BatchQueue::count_of(std::uint64_t number) const noexcept {
  return *reinterpret_cast<const std::uint64_t*>(queue_bytes() + count_at(number));
}

std::uint64_t BatchQueue::elements(std::uint64_t number) const noexcept {
  return count_of(number) & elements_mask;
}

std::uint64_t BatchQueue::left_out(std::uint64_t number) const noexcept {
  if (number < published()) return count_of(number) >> left_out_bit;
  const auto noted = queue_->left_out.load();
  return (noted & elements_mask) == key_of(number) ? noted >> left_out_bit : 0;
}

// In these three functions a reader may still see the older index: then it finds fewer batches consumed and
// waits longer.
std::uint64_t BatchQueue::consumed() const noexcept {
  return session_->counters(session_->word().index).batches[rank_];
}

std::uint64_t BatchQueue::released() const noexcept {
  const bool keeps = session_->header().keeps_last_step != 0;
  return read_counters(*session_, [&](const Counters& valid) {
    return valid.batches[rank_] - (keeps ? std::uint64_t{valid.last_batches[rank_]} : 0);
  });
}

std::uint64_t BatchQueue::first_of_attempt() const noexcept {
  const auto& counters = session_->counters(session_->word().index);
  const bool again = session_->control().request.repeat != 0;
  return counters.batches[rank_] - (again ? std::uint64_t{counters.last_batches[rank_]} : 0);
}

std::byte* BatchQueueWriter::claim() const noexcept {
  const auto number = queue_->published.load(std::memory_order_relaxed);
  return number - released() < session().header().slots ? bytes() + slot_at(number) : nullptr;
}

void BatchQueueWriter::fill(std::uint64_t elements) noexcept {
  queue_->filling.store(elements, std::memory_order_release);
}

void BatchQueueWriter::leave_out(std::uint64_t elements) noexcept {
  queue_->left_out.store(elements << left_out_bit | key_of(published()));
}

void BatchQueueWriter::publish(std::uint64_t elements) noexcept {
  const auto number = queue_->published.load(std::memory_order_relaxed);
  *reinterpret_cast<std::uint64_t*>(bytes() + count_at(number)) = left_out(number) << left_out_bit | elements;
  // The order matters. A loader that is killed in between leaves elements that are read from the source
  // again. In the other order the published batch would have them, and the loader that takes over would find
  // them in the next slot too.
  queue_->filling.store(0, std::memory_order_release);
  queue_->published.store(number + 1, std::memory_order_release);
  ipc::advance(queue_->filled);
}

void BatchQueueWriter::finish(const std::string& error) noexcept {
  const auto length = std::min(error.size(), text_bytes - 1);
  std::memcpy(queue_->error, error.data(), length);
  queue_->error[length] = 0;
  queue_->failed.store(error.empty() ? 0 : 1);
  queue_->end.store(queue_->published.load());
  ipc::advance(queue_->filled);
}

void BatchQueueWriter::reopen() noexcept {
  queue_->end.store(no_end);
  queue_->failed.store(0);
}

void BatchQueueWriter::rewind() noexcept {
  queue_->filling.store(0);
  queue_->left_out.store(0);
  queue_->published.store(consumed());
  reopen();
}

std::uint64_t BatchQueue::filling() const noexcept {
  const auto elements = queue_->filling.load();
  return elements <= session_->header().batch_size ? elements : 0;
}

BatchQueue::State BatchQueue::look(std::uint64_t number, Filled& out) const {
  if (number < queue_->published.load(std::memory_order_acquire)) {
    out = {slot(number), elements(number), left_out(number)};
    if (const auto most = session_->header().batch_size; out.elements > most)
      throw SessionError(fmt::format("batch {} in the queue of rank {} has {} elements; it can have {}",
                                     number, rank_, out.elements, most));
    return out.elements > 0 ? State::filled : State::none;
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
    ipc::wait_changed(queue_->filled, seen, timing::look_ns, spin_us);
  }
}

std::string BatchQueue::error() const { return {queue_->error, strnlen(queue_->error, text_bytes)}; }

}  // namespace accelmgr::session
