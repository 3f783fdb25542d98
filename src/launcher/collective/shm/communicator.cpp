// The collectives of the shm backend. They cut buffers into rounds of a group.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "launcher/collective/kernels/kernels.hpp"
#include "launcher/collective/shm/factory.hpp"
#include "launcher/collective/shm/group.hpp"
#include "launcher/collective/signature/argument_checks.hpp"

namespace accelmgr::collective::shm {
namespace {

/// From this size on, reducing slices is worth a second synchronization.
constexpr std::size_t slices_from_bytes = 16 * 1024;
constexpr int slices_from_ranks = 3;

/// Results from this size on are stored past the caches.
constexpr std::size_t past_caches_from_bytes = std::size_t{4} << 20;

Stores stores_for(std::size_t bytes) noexcept {
  return bytes >= past_caches_from_bytes ? Stores::past_caches : Stores::cached;
}

const std::byte* bytes_of(const void* p) noexcept { return static_cast<const std::byte*>(p); }
std::byte* bytes_of(void* p) noexcept { return static_cast<std::byte*>(p); }

void copy_bytes(void* to, const void* from, std::size_t bytes) noexcept {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

std::size_t parts_of(std::size_t whole, std::size_t part) noexcept { return (whole + part - 1) / part; }

/// Calls body(at, bytes) for parts of at most `most` bytes; once if there are none, because members compare
/// their calls even then.
template <class Body>
void in_parts(std::size_t whole, std::size_t most, Body body) {
  std::size_t at = 0;
  do {
    const auto part = std::min(most, whole - at);
    body(at, part);
    at += part;
  } while (at < whole);
}

constexpr std::size_t aligned_down(std::size_t bytes) noexcept { return bytes / 64 * 64; }
constexpr std::size_t aligned_up(std::size_t bytes) noexcept { return (bytes + 63) / 64 * 64; }

class ShmCommunicator final : public Communicator {
 public:
  explicit ShmCommunicator(std::unique_ptr<Group> group);

  std::string_view backend() const noexcept override { return "shm"; }
  int rank() const noexcept override { return group_->me(); }
  int size() const noexcept override { return group_->size(); }
  const std::vector<int>& ranks() const noexcept override { return group_->world_ranks(); }
  std::vector<int> gone() override { return group_->gone(); }

  void all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                  const CallOptions& options) override;
  void reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                      const CallOptions& options) override;
  void all_gather(const void* in, void* out, std::size_t count, DType dtype,
                  const CallOptions& options) override;
  void broadcast(void* data, std::size_t count, DType dtype, int root, const CallOptions& options) override;
  void all_to_all(const void* in, void* out, std::size_t count, DType dtype,
                  const CallOptions& options) override;
  void barrier(const CallOptions& options) override;
  std::vector<std::string> all_gather_objects(std::string_view object, const CallOptions& options) override;
  std::string broadcast_object(std::string_view object, int root, const CallOptions& options) override;
  std::shared_ptr<Communicator> group(std::span<const int> ranks, const CallOptions& options) override;

  void give_up() noexcept { group_->give_up(); }

 private:
  class Call;
  struct Reduction {
    const std::byte* in;
    std::byte* out;
    std::size_t count;
    DType dtype;
    ReduceOp op;
  };

  /// Returns body(call) for a call with this signature. Any exception other than CollectiveError ends the
  /// group.
  template <class Body>
  auto run(CallKind kind, std::size_t count, DType dtype, ReduceOp op, int root, const CallOptions& options,
           Body body);
  double timeout_s(const CallOptions& options) const noexcept;

  void reduce_whole(Call& call, const Reduction& reduction);
  void reduce_slices(Call& call, const Reduction& reduction);
  /// out = the reduction of `count` elements: those at `offset` in the halves of the other members, and those
  /// at `mine` of this member.
  void reduce_halves(std::size_t offset, const void* mine, void* out, std::size_t count,
                     const Reduction& reduction, Stores stores);

  std::unique_ptr<Group> group_;
  std::uint64_t calls_ = 0;
  std::map<std::vector<int>, std::uint64_t> groups_made_;
  std::vector<const void*> inputs_;
};

}  // namespace

/// A call under way. It has one or more rounds.
class ShmCommunicator::Call {
 public:
  Call(Group& group, const Signature& signature, double timeout_s)
      : group_(group), signature_(signature), patience_(timeout_s) {
    group_.check_usable(signature, patience_);
  }

  std::byte* next_half(std::size_t bytes) { return group_.next_half(bytes); }
  void exchange(std::uint64_t length = 0) {
    if (first_)
      group_.exchange_first(signature_, length, patience_);
    else
      group_.exchange(signature_, patience_);
    first_ = false;
  }

 private:
  Group& group_;
  const Signature& signature_;
  base::Patience patience_;
  bool first_ = true;
};

ShmCommunicator::ShmCommunicator(std::unique_ptr<Group> group)
    : group_(std::move(group)), inputs_(static_cast<std::size_t>(group_->size())) {}

double ShmCommunicator::timeout_s(const CallOptions& options) const noexcept {
  return options.timeout_s > 0 ? options.timeout_s : group_->world().timeout_s();
}

template <class Body>
auto ShmCommunicator::run(CallKind kind, std::size_t count, DType dtype, ReduceOp op, int root,
                          const CallOptions& options, Body body) {
  const auto signature = make_signature(kind, count, dtype, op, root, calls_ + 1, options);
  Call call(*group_, signature, timeout_s(options));
  ++calls_;
  try {
    return body(call);
  } catch (const CollectiveError&) {
    throw;
  } catch (...) {
    group_->give_up();  // No memory. The other members must not wait for the rest of this call.
    throw;
  }
}

void ShmCommunicator::all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                                 const CallOptions& options) {
  check_reduction(dtype, op);
  const Reduction reduction{bytes_of(in), bytes_of(out), count, dtype, op};
  const bool slices = size() >= slices_from_ranks && count * size_of(dtype) >= slices_from_bytes;
  run(CallKind::all_reduce, count, dtype, op, 0, options,
      [&](Call& call) { slices ? reduce_slices(call, reduction) : reduce_whole(call, reduction); });
}

void ShmCommunicator::reduce_halves(std::size_t offset, const void* mine, void* out, std::size_t count,
                                    const Reduction& reduction, Stores stores) {
  for (int member = 0; member < size(); ++member)
    inputs_[static_cast<std::size_t>(member)] = member == rank() ? mine : group_->half(member) + offset;
  best_kernels().reduce(reduction.dtype, reduction.op, inputs_, out, count, inputs_.size(), stores);
}

// Every member that wants the result reduces everything. This costs one synchronization per chunk and moves
// the fewest bytes between two ranks.
void ShmCommunicator::reduce_whole(Call& call, const Reduction& reduction) {
  const auto element = size_of(reduction.dtype);
  const auto bytes = reduction.count * element;
  const auto stores = stores_for(bytes);
  in_parts(bytes, group_->half_bytes(), [&](std::size_t at, std::size_t part) {
    copy_bytes(call.next_half(part), reduction.in + at, part);
    call.exchange();
    if (reduction.out != nullptr)
      reduce_halves(0, reduction.in + at, reduction.out + at, part / element, reduction, stores);
  });
}

// Each member reduces one slice of a chunk. The round that posts the inputs of a chunk also posts the reduced
// slices of the chunk before. So each chunk costs one synchronization, and the last one costs two.
//
//   half of a member, n members   | input slice 0 | ... | input slice n-1 | reduced slice |
void ShmCommunicator::reduce_slices(Call& call, const Reduction& reduction) {
  const auto element = size_of(reduction.dtype);
  const auto bytes = reduction.count * element;
  const auto stores = stores_for(bytes);
  const auto n = static_cast<std::size_t>(size());
  const auto me = static_cast<std::size_t>(rank());
  const auto most = aligned_down(group_->half_bytes() / (n + 1));
  const auto chunks = parts_of(bytes, n * most);
  const auto slice = aligned_up(parts_of(parts_of(bytes, chunks), n));
  const auto chunk = n * slice;
  const auto reduced = chunk;  // Its offset in a half.
  // Begin and bytes, in the buffer, of slice `member` in chunk `number`.
  const auto place = [&](std::size_t number, std::size_t member) {
    const auto begin = std::min(bytes, number * chunk + member * slice);
    return std::pair(begin, std::min(slice, bytes - begin));
  };
  for (std::size_t round = 0; round <= chunks; ++round) {
    auto* half = call.next_half(reduced + slice);
    if (round < chunks) {
      const auto [begin, mine] = place(round, me);
      const auto end = std::min(bytes, (round + 1) * chunk);
      const auto before = begin - std::min(begin, round * chunk);
      copy_bytes(half, reduction.in + round * chunk, before);
      copy_bytes(half + before + mine, reduction.in + begin + mine, end - begin - mine);
    }
    call.exchange();
    if (round < chunks) {
      const auto [begin, mine] = place(round, me);
      reduce_halves(me * slice, reduction.in + begin, call.next_half(reduced + slice) + reduced,
                    mine / element, reduction, Stores::cached);
    }
    if (round > 0 && reduction.out != nullptr) {
      for (std::size_t member = 0; member < n; ++member) {
        const auto [begin, theirs] = place(round - 1, member);
        best_kernels().copy(reduction.out + begin, group_->half(static_cast<int>(member)) + reduced, theirs,
                            stores);
      }
    }
  }
}

void ShmCommunicator::reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                                     const CallOptions& options) {
  check_reduction(dtype, op);
  const Reduction reduction{bytes_of(in), bytes_of(out), count, dtype, op};
  const auto n = static_cast<std::size_t>(size());
  const auto me = static_cast<std::size_t>(rank());
  const auto block = count * size_of(dtype);
  const auto stores = stores_for(block);
  run(CallKind::reduce_scatter, count, dtype, op, 0, options, [&](Call& call) {
    in_parts(block, aligned_down(group_->half_bytes() / n), [&](std::size_t at, std::size_t part) {
      auto* half = call.next_half(n * part);
      for (std::size_t to = 0; to < n; ++to)
        if (to != me) copy_bytes(half + to * part, reduction.in + to * block + at, part);
      call.exchange();
      reduce_halves(me * part, reduction.in + me * block + at, reduction.out + at, part / size_of(dtype),
                    reduction, stores);
    });
  });
}

void ShmCommunicator::all_gather(const void* in, void* out, std::size_t count, DType dtype,
                                 const CallOptions& options) {
  const auto block = count * size_of(dtype);
  const auto stores = stores_for(block * static_cast<std::size_t>(size()));
  run(CallKind::all_gather, count, dtype, ReduceOp::sum, 0, options, [&](Call& call) {
    in_parts(block, group_->half_bytes(), [&](std::size_t at, std::size_t part) {
      copy_bytes(call.next_half(part), bytes_of(in) + at, part);
      call.exchange();
      // This member's part is copied from the half too: when `in` is the begin of `out`, the copy of rank 0's
      // part may already have overwritten it.
      for (int member = 0; member < size(); ++member)
        best_kernels().copy(bytes_of(out) + static_cast<std::size_t>(member) * block + at,
                            group_->half(member), part, stores);
    });
  });
}

void ShmCommunicator::broadcast(void* data, std::size_t count, DType dtype, int root,
                                const CallOptions& options) {
  check_member(root, size(), "root");
  const auto bytes = count * size_of(dtype);
  const auto stores = stores_for(bytes);
  run(CallKind::broadcast, count, dtype, ReduceOp::sum, root, options, [&](Call& call) {
    in_parts(bytes, group_->half_bytes(), [&](std::size_t at, std::size_t part) {
      if (rank() == root) copy_bytes(call.next_half(part), bytes_of(data) + at, part);
      call.exchange();
      if (rank() != root) best_kernels().copy(bytes_of(data) + at, group_->half(root), part, stores);
    });
  });
}

void ShmCommunicator::all_to_all(const void* in, void* out, std::size_t count, DType dtype,
                                 const CallOptions& options) {
  const auto n = static_cast<std::size_t>(size());
  const auto me = static_cast<std::size_t>(rank());
  const auto block = count * size_of(dtype);
  const auto stores = stores_for(block * n);
  run(CallKind::all_to_all, count, dtype, ReduceOp::sum, 0, options, [&](Call& call) {
    in_parts(block, aligned_down(group_->half_bytes() / n), [&](std::size_t at, std::size_t part) {
      auto* half = call.next_half(n * part);
      for (std::size_t to = 0; to < n; ++to)
        if (to != me) copy_bytes(half + to * part, bytes_of(in) + to * block + at, part);
      call.exchange();
      for (std::size_t from = 0; from < n; ++from) {
        const auto* source =
            from == me ? bytes_of(in) + me * block + at : group_->half(static_cast<int>(from)) + me * part;
        best_kernels().copy(bytes_of(out) + from * block + at, source, part, stores);
      }
    });
  });
}

void ShmCommunicator::barrier(const CallOptions& options) {
  run(CallKind::barrier, 0, DType::uint8, ReduceOp::sum, 0, options, [](Call& call) { call.exchange(); });
}

std::vector<std::string> ShmCommunicator::all_gather_objects(std::string_view object,
                                                             const CallOptions& options) {
  return run(CallKind::all_gather_objects, 0, DType::uint8, ReduceOp::sum, 0, options, [&](Call& call) {
    std::vector<std::string> objects(static_cast<std::size_t>(size()));
    std::size_t longest = object.size();
    std::size_t at = 0;
    do {
      const auto mine = object.substr(std::min(at, object.size()), group_->half_bytes());
      copy_bytes(call.next_half(mine.size()), mine.data(), mine.size());
      call.exchange(object.size());
      if (at == 0) {
        for (int member = 0; member < size(); ++member) {
          const auto length = group_->length(member);
          objects[static_cast<std::size_t>(member)].resize(length);
          longest = std::max<std::size_t>(longest, length);
        }
      }
      for (int member = 0; member < size(); ++member) {
        auto& theirs = objects[static_cast<std::size_t>(member)];
        if (at < theirs.size())
          copy_bytes(theirs.data() + at, group_->half(member),
                     std::min(group_->half_bytes(), theirs.size() - at));
      }
      at += group_->half_bytes();
    } while (at < longest);
    return objects;
  });
}

std::string ShmCommunicator::broadcast_object(std::string_view object, int root, const CallOptions& options) {
  check_member(root, size(), "root");
  return run(CallKind::broadcast_object, 0, DType::uint8, ReduceOp::sum, root, options, [&](Call& call) {
    const bool sends = rank() == root;
    std::string result(sends ? object : std::string_view());
    std::size_t at = 0;
    do {
      if (sends) {
        const auto part = object.substr(at, group_->half_bytes());
        copy_bytes(call.next_half(part.size()), part.data(), part.size());
      }
      call.exchange(sends ? object.size() : 0);
      if (at == 0 && !sends) result.resize(group_->length(root));
      const auto part = std::min(group_->half_bytes(), result.size() - at);
      if (!sends) copy_bytes(result.data() + at, group_->half(root), part);
      at += part;
    } while (at < result.size());
    return result;
  });
}

std::shared_ptr<Communicator> ShmCommunicator::group(std::span<const int> ranks, const CallOptions& options) {
  check_group(ranks, rank(), size());
  group_->check_process("group");
  GroupKey key{.parent = group_->id(), .ordinal = 0, .members = {}};
  for (const int member : ranks) key.members.push_back(group_->members()[static_cast<std::size_t>(member)]);
  key.ordinal = ++groups_made_[key.members];
  base::Patience patience(timeout_s(options));
  auto group = std::make_unique<Group>(group_->shared_world(), std::move(key), patience.deadline());
  Signature signature{};
  signature.sequence = calls_ + 1;
  signature.kind = CallKind::group;
  group->wait_joined(signature, patience);
  return std::make_shared<ShmCommunicator>(std::move(group));
}

void give_up(Communicator& communicator) noexcept {
  if (auto* shared = dynamic_cast<ShmCommunicator*>(&communicator)) shared->give_up();
}

std::shared_ptr<Communicator> join_world(int fd, int rank, const JoinOptions& options) {
  auto world = std::make_shared<World>(fd, rank, options.timeout_s, options.world_ranks);
  const auto deadline = base::Deadline::in_seconds(options.timeout_s);
  GroupKey all{
      .parent = 0, .ordinal = 0, .members = std::vector<int>(static_cast<std::size_t>(world->size()))};
  std::iota(all.members.begin(), all.members.end(), 0);
  return std::make_shared<ShmCommunicator>(
      std::make_unique<Group>(std::move(world), std::move(all), deadline));
}

}  // namespace accelmgr::collective::shm
