// What operations of NCCL do, on memory that the ranks of a communicator share: they are in one process or in
// several. No rank is told what happens to another one: operations wait for it until they are aborted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/cuda/nccl.hpp"
#include "base/ipc/memory.hpp"
#include "engine/support/fake_cuda.hpp"

namespace accelmgr::test::fake_nccl {

enum class Kind : std::uint32_t { all_reduce, reduce_scatter, all_gather, broadcast, exchange };

/// What all ranks of an operation must agree on.
struct Signature {
  Kind kind;
  std::size_t count = 0;
  device::NcclType type = device::NcclType::uint8;
  device::NcclOperation operation = device::NcclOperation::sum;
  int root = 0;

  std::size_t bytes() const;
  bool operator==(const Signature&) const = default;
};

struct Message {
  int peer;
  std::span<std::byte> memory;
};

/// What one rank brings to an operation. An exchange has messages, and the others have memory.
struct Share {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::vector<Message> sends{}, receives{};
};

/// The memory of a communicator. It begins as a memfd of zeros, whose place is in the id.
class Team {
 public:
  /// Writes the id of a new team. The team exists as long as the descriptor is open. `seed` decides in which
  /// orders ranks are summed up.
  static base::UniqueFd make(device::NcclId& id, std::uint64_t seed);
  /// Null if the process that made the id is gone.
  static std::shared_ptr<Team> open(const device::NcclId& id, int size);

  /// Returns false if that rank has joined already, or the others have another size.
  bool join(int rank, int size);
  bool all_have_joined() const;
  /// Notes the rank's operation `number`, from 0 on. Returns false if another rank has noted a different one.
  bool issue(int rank, std::uint64_t number, const Signature& signature);
  bool all_have_issued() const;  ///< At least one operation.
  bool disagrees() const { return shared_->disagrees.load(); }
  void abort(int rank) { member(rank).aborted.store(true); }
  bool has_aborted(int rank) const { return member(rank).aborted.load(); }
  int size() const { return size_; }

 private:
  friend class Operation;

  static constexpr std::size_t most_members = 24;
  static constexpr std::size_t noted = 256;  // Operations.
  static constexpr std::size_t slots = 4;    // Of each rank: so many operations are under way.
  static constexpr std::size_t slot_bytes = std::size_t{64} << 20;  // Sparse. Larger than a padded bucket.

  /// One rank's part of operations slot, slot + slots, ... Each field is the number of the last one that has
  /// come so far, plus 1.
  struct Slot {
    std::atomic<std::uint64_t> arrived;    ///< At the front of its stream.
    std::atomic<std::uint64_t> published;  ///< What the rank contributes is in the memory of the slot.
    std::atomic<std::uint64_t> read;       ///< The rank has read what all have contributed.
  };
  /// Written by that rank.
  struct Member {
    alignas(64) std::atomic<bool> joined, aborted;
    std::atomic<std::uint64_t> issued;
    Signature signatures[noted];
    Slot slots[Team::slots];
  };
  struct Shared {
    std::uint64_t seed;           ///< Written by the process that made the id.
    std::atomic<int> size;        ///< Written by the first rank that joins.
    std::atomic<bool> disagrees;  ///< Written by any rank.
    Member members[most_members];
  };
  static constexpr std::size_t header_bytes = (sizeof(Shared) + 4095) / 4096 * 4096;

  Team(ipc::Mapping memory, int size);
  Member& member(int rank) const { return shared_->members[rank]; }
  std::byte* slot(int rank, std::uint64_t number) const;
  template <class Predicate>
  bool all(Predicate&& predicate) const;

  ipc::Mapping memory_;
  Shared* shared_;
  int size_;
};

/// One rank's part of an operation, once it is noted: a polled kernel.
class Operation {
 public:
  Operation(std::shared_ptr<Team> team, int rank, std::uint64_t number, const Signature& signature,
            Share share);

  /// The memory that it writes.
  std::vector<std::span<std::byte>> written() const;
  /// False: it contributes more than the fake has room for.
  bool fits() const;
  /// An aborted operation leaves wrong values.
  FakeCuda::Progress progress();

 private:
  enum class Phase { queued, arrived, published };

  std::size_t contributed_bytes() const;
  void publish() const;
  void finish() const;
  void reduce(std::size_t offset) const;
  std::byte* slot(int rank) const { return team_->slot(rank, number_); }

  std::shared_ptr<Team> team_;
  int rank_;
  std::uint64_t number_;
  Signature signature_;
  Share share_;
  Phase phase_ = Phase::queued;
};

}  // namespace accelmgr::test::fake_nccl
