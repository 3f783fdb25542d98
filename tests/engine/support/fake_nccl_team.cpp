#include "engine/support/fake_nccl_team.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

#include "half_precision.hpp"

namespace accelmgr::test::fake_nccl {

using device::NcclOperation;
using device::NcclType;
using Progress = FakeCuda::Progress;

namespace {

constexpr std::byte any_value{0xff};

/// What an id says: where the memory is.
struct Place {
  pid_t pid;
  int fd;
};

/// Where the message to a rank is in the slot of its sender. All ranks' come first in an exchange.
struct Block {
  std::size_t offset, bytes;
};

/// Calls `function` with a number of that type.
template <class Function>
auto with_type(NcclType type, Function&& function) {
  switch (type) {
    case NcclType::int8:
      return function(std::int8_t{});
    case NcclType::uint8:
      return function(std::uint8_t{});
    case NcclType::int32:
      return function(std::int32_t{});
    case NcclType::uint32:
      return function(std::uint32_t{});
    case NcclType::int64:
      return function(std::int64_t{});
    case NcclType::uint64:
      return function(std::uint64_t{});
    case NcclType::float32:
      return function(float{});
    case NcclType::float64:
      return function(double{});
    case NcclType::float16:
      return function(Float16{});
    case NcclType::bfloat16:
      return function(BFloat16{});
  }
  throw std::logic_error("the fake knows no such type");
}

template <class T>
T combined(T a, T b, NcclOperation operation) {
  switch (operation) {
    case NcclOperation::product:
      return static_cast<T>(a * b);
    case NcclOperation::maximum:
      return std::max(a, b);
    case NcclOperation::minimum:
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}
template <class T>
T divided(T sum, std::size_t ranks) {
  return static_cast<T>(sum / static_cast<T>(ranks));
}

// Numbers of 16 bits are rounded after each rank, as in NCCL, which passes sums from rank to rank.
template <class Half>
requires requires(Half half) { half.bits; }
Half combined(Half a, Half b, NcclOperation operation) {
  return to_half<Half>(combined(from_half(a), from_half(b), operation));
}
template <class Half>
requires requires(Half half) { half.bits; }
Half divided(Half sum, std::size_t ranks) { return to_half<Half>(divided(from_half(sum), ranks)); }

}  // namespace

std::size_t Signature::bytes() const {
  return count * with_type(type, [](auto number) { return sizeof number; });
}

base::UniqueFd Team::make(device::NcclId& id, std::uint64_t seed) {
  auto memory =
      ipc::create_memfd("fake nccl", header_bytes + most_members * slots * slot_bytes, ipc::Allocate::later);
  const ipc::Mapping header(memory.get(), 0, header_bytes, ipc::Access::read_write);
  reinterpret_cast<Shared*>(header.data())->seed = seed;
  const Place place{getpid(), memory.get()};
  id = {};
  std::memcpy(id.bytes, &place, sizeof place);
  return memory;
}

std::shared_ptr<Team> Team::open(const device::NcclId& id, int size) {
  Place place{};
  std::memcpy(&place, id.bytes, sizeof place);
  const auto path = "/proc/" + std::to_string(place.pid) + "/fd/" + std::to_string(place.fd);
  const base::UniqueFd memory(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!memory) return nullptr;
  const auto bytes = header_bytes + static_cast<std::size_t>(size) * slots * slot_bytes;
  return std::shared_ptr<Team>(new Team({memory.get(), 0, bytes, ipc::Access::read_write}, size));
}

Team::Team(ipc::Mapping memory, int size)
    : memory_(std::move(memory)), shared_(reinterpret_cast<Shared*>(memory_.data())), size_(size) {}

std::byte* Team::slot(int rank, std::uint64_t number) const {
  return memory_.data() + header_bytes +
         (static_cast<std::size_t>(rank) * slots + number % slots) * slot_bytes;
}

template <class Predicate>
bool Team::all(Predicate&& predicate) const {
  return std::all_of(shared_->members, shared_->members + size_, predicate);
}

bool Team::join(int rank, int size) {
  int size_of_first = 0;
  shared_->size.compare_exchange_strong(size_of_first, size);
  const bool agrees = size_of_first == 0 || size_of_first == size;
  return agrees && rank < size && !member(rank).joined.exchange(true);
}

bool Team::all_have_joined() const {
  return all([](const Member& member) { return member.joined.load(); });
}

bool Team::all_have_issued() const {
  return all([](const Member& member) { return member.issued.load() > 0; });
}

bool Team::issue(int rank, std::uint64_t number, const Signature& signature) {
  member(rank).signatures[number % noted] = signature;
  member(rank).issued.store(number + 1);
  const bool agrees = all([&](const Member& other) {
    const auto issued = other.issued.load();
    return issued <= number || issued > number + noted || other.signatures[number % noted] == signature;
  });
  if (!agrees) shared_->disagrees.store(true);
  return agrees;
}

Operation::Operation(std::shared_ptr<Team> team, int rank, std::uint64_t number, const Signature& signature,
                     Share share)
    : team_(std::move(team)), rank_(rank), number_(number), signature_(signature), share_(std::move(share)) {}

std::vector<std::span<std::byte>> Operation::written() const {
  const auto size = static_cast<std::size_t>(team_->size());
  if (signature_.kind != Kind::exchange)
    return {{share_.to, signature_.bytes() * (signature_.kind == Kind::all_gather ? size : 1)}};
  std::vector<std::span<std::byte>> memory;
  for (const auto& message : share_.receives) memory.push_back(message.memory);
  return memory;
}

std::size_t Operation::contributed_bytes() const {
  const auto size = static_cast<std::size_t>(team_->size());
  switch (signature_.kind) {
    case Kind::reduce_scatter:
      return signature_.bytes() * size;
    case Kind::broadcast:
      return rank_ == signature_.root ? signature_.bytes() : 0;
    case Kind::exchange:
      return std::accumulate(
          share_.sends.begin(), share_.sends.end(), size * sizeof(Block),
          [](std::size_t sum, const Message& message) { return sum + message.memory.size(); });
    default:
      return signature_.bytes();
  }
}

bool Operation::fits() const { return contributed_bytes() <= Team::slot_bytes; }

Progress Operation::progress() {
  if (team_->has_aborted(rank_)) {
    for (const auto& memory : written()) std::ranges::fill(memory, any_value);
    return Progress::done;
  }
  auto& own = team_->member(rank_).slots[number_ % Team::slots];
  const auto all = [&](std::atomic<std::uint64_t> Team::Slot::*field, std::uint64_t least) {
    return team_->all(
        [&](const auto& other) { return (other.slots[number_ % Team::slots].*field).load() >= least; });
  };
  const auto count = number_ + 1;
  switch (phase_) {
    case Phase::queued:  // Until all have read what the slots had before.
      if (number_ >= Team::slots && !all(&Team::Slot::read, count - Team::slots)) return Progress::none;
      own.arrived.store(count);
      phase_ = Phase::arrived;
      return Progress::some;
    case Phase::arrived:  // Inputs are read as late as NCCL may.
      if (!all(&Team::Slot::arrived, count)) return Progress::none;
      publish();
      own.published.store(count);
      phase_ = Phase::published;
      return Progress::some;
    case Phase::published:
      break;
  }
  if (!all(&Team::Slot::published, count)) return Progress::none;
  finish();
  own.read.store(count);
  return Progress::done;
}

/// Copies what the rank contributes into its slot.
void Operation::publish() const {
  auto* to = slot(rank_);
  if (signature_.kind != Kind::exchange) {
    std::copy_n(share_.from, contributed_bytes(), to);
    return;
  }
  std::vector<Block> blocks(static_cast<std::size_t>(team_->size()));
  auto offset = blocks.size() * sizeof(Block);
  for (const auto& [peer, memory] : share_.sends) {
    blocks.at(static_cast<std::size_t>(peer)) = {offset, memory.size()};
    std::ranges::copy(memory, to + offset);
    offset += memory.size();
  }
  std::memcpy(to, blocks.data(), blocks.size() * sizeof(Block));
}

/// Writes what the rank gets.
void Operation::finish() const {
  const auto bytes = signature_.bytes();
  switch (signature_.kind) {
    case Kind::all_reduce:
      return reduce(0);
    case Kind::reduce_scatter:
      return reduce(static_cast<std::size_t>(rank_) * bytes);
    case Kind::all_gather:
      for (int from = 0; from < team_->size(); ++from)
        std::copy_n(slot(from), bytes, share_.to + static_cast<std::size_t>(from) * bytes);
      return;
    case Kind::broadcast:
      std::copy_n(slot(signature_.root), bytes, share_.to);
      return;
    case Kind::exchange:
      for (const auto& [peer, memory] : share_.receives) {
        Block block{};
        std::memcpy(&block, slot(peer) + static_cast<std::size_t>(rank_) * sizeof block, sizeof block);
        std::copy_n(slot(peer) + block.offset, std::min(block.bytes, memory.size()), memory.data());
      }
  }
}

/// Combines what all ranks have at `offset`, in an order of ranks that is the same on all, as NCCL promises
/// none.
void Operation::reduce(std::size_t offset) const {
  std::vector<const std::byte*> ranks;
  for (int rank = 0; rank < team_->size(); ++rank) ranks.push_back(slot(rank) + offset);
  std::mt19937_64 random(team_->shared_->seed + number_);
  std::ranges::shuffle(ranks, random);
  with_type(signature_.type, [&](auto sum) {
    for (std::size_t i = 0; i < signature_.count; ++i) {
      std::memcpy(&sum, ranks[0] + i * sizeof sum, sizeof sum);
      for (std::size_t r = 1; r < ranks.size(); ++r) {
        auto value = sum;
        std::memcpy(&value, ranks[r] + i * sizeof value, sizeof value);
        sum = combined(sum, value, signature_.operation);
      }
      if (signature_.operation == NcclOperation::mean) sum = divided(sum, ranks.size());
      std::memcpy(share_.to + i * sizeof sum, &sum, sizeof sum);
    }
  });
}

}  // namespace accelmgr::test::fake_nccl
