// A session as one process has it mapped, with typed access to the structures of layout.hpp.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/ipc/memory.hpp"
#include "base/ipc/private_in_children.hpp"
#include "base/unique_fd.hpp"
#include "engine/session/layout.hpp"

namespace accelmgr::session {

/// Checks that there is memory for a session. Throws SessionError, which states both numbers, if its size
/// `bytes` exceeds `limit_bytes` (0: no limit), or if `more_bytes`, the part that is not allocated yet,
/// exceeds the memory that is available.
void check_memory(std::uint64_t bytes, std::uint64_t limit_bytes, std::uint64_t more_bytes);
inline void check_memory(std::uint64_t bytes, std::uint64_t limit_bytes) {
  check_memory(bytes, limit_bytes, bytes);
}

class Session {
 public:
  /// Creates the memfds, and makes the session and the slabs of the first `ranks` ranks present in memory;
  /// the parameters only if `parameters` is now. Write the manifest and the initial values next, then call
  /// publish(). Throws SessionError.
  static Session create(const Extent& extent, int ranks, int populate_threads,
                        ipc::Allocate parameters = ipc::Allocate::now);
  /// Maps a session that another process created; `fds` as fds() returns them. If `protect_for_rank` >= 0,
  /// the slabs of all other ranks are mapped read-only; with `protect_parameters`, the parameters too. Throws
  /// SessionError if the memory is no session of this build, or if any size or offset differs from what
  /// create() plans.
  static Session attach(std::vector<base::UniqueFd> fds, int protect_for_rank = -1,
                        bool protect_parameters = false);

  /// Maps the session memfd alone, for reading: members that are not const, and those that concern slabs,
  /// must not be called. `fd` is not needed afterwards. Throws as attach() does.
  static Session observe(const base::UniqueFd& fd);

  /// Stores the magic word: from now on other processes can attach.
  void publish() noexcept;
  /// Allocates the slab of a rank if it has no memory yet. Makes its pages present in this process unless
  /// `populate_threads` is 0. Throws SessionError.
  void allocate_slab(int rank, int populate_threads = 0) const;
  /// Allocates `bytes` of the room for gradients, from `gradient` on, and `slab_bytes` of that in the slab of
  /// each rank of `team`, from `slab` on. Throws SessionError.
  void allocate_room(std::uint64_t gradient, std::uint64_t bytes, std::uint64_t slab,
                     std::uint64_t slab_bytes, RankMask team) const;
  /// Gives these moments memory: zeros. Throws SessionError.
  void allocate_moments(Moments moments) const;
  /// A mapping of the parameters for writing, for a process that has protected them.
  ipc::Mapping writable_parameters() const;
  /// Makes the gradients, parameters and slabs that `rank` touches in a step of `team` present in this
  /// process, so that no step waits for their page faults.
  void populate_for(int rank, RankMask team) const;
  /// Children that are forked from now on do not have the mappings; one that uses them dies. For processes in
  /// which user code forks.
  void keep_from_children() const;
  /// Children that are forked from now on have private mappings at the addresses of the session; slabs stay
  /// shared. For a process whose tensors lie in the session. `shared`: children have shared mappings again.
  void make_private_in_children(bool shared = false);
  /// Gives up the shared memory, for a process that leaves the session to others: what this object showed
  /// stays readable and writable at its addresses, as a private copy; slabs are zeros. If there is no memory
  /// for the copy, it can only be read, and still shows what others write. False if this process can still
  /// write to the session.
  bool make_private() noexcept;
  /// The descriptors of the session memfd, then of the slab of each rank; none after make_private().
  std::vector<int> fds() const;
  /// Offset of the parameters in the session memfd, in bytes.
  std::uint64_t parameters_offset() const noexcept { return header_->parameters; }

  const Header& header() const noexcept { return *header_; }
  int ranks() const noexcept { return static_cast<int>(header_->ranks); }
  /// Bytes that a slab takes, and that the session takes with the slabs of `ranks` ranks.
  std::uint64_t slab_bytes() const noexcept;
  std::uint64_t used_bytes(int ranks) const noexcept;
  StepWord word() const noexcept { return load(control().word); }

  // A const Session changes nothing. Processes write to a session through their views (views.hpp). The
  // members that are not const serve the views, and the process that creates the session.
  const Control& control() const noexcept { return *at<Control>(header_->control); }
  Control& control() noexcept { return *at<Control>(header_->control); }
  const RankRecord& record(int rank) const noexcept { return at<RankRecord>(header_->records)[rank]; }
  RankRecord& record(int rank) noexcept { return at<RankRecord>(header_->records)[rank]; }
  const Sharding& sharding() const noexcept { return *at<Sharding>(header_->sharding); }
  Sharding& sharding() noexcept { return *at<Sharding>(header_->sharding); }
  /// The valid state of the data source. Throws SessionError if its index or its size is impossible.
  const SourceState& source_state() const { return valid_source_state(); }
  SourceState& source_state() { return valid_source_state(); }
  /// Incident `number`, counted from 1.
  /// Requires: it is one of the last max_incidents.
  const Incident& incident(std::uint64_t number) const noexcept { return incidents()[place_of(number)]; }
  Incident& incident(std::uint64_t number) noexcept { return incidents()[place_of(number)]; }
  const StepHistory& history() const noexcept { return *at<StepHistory>(header_->history); }
  StepHistory& history() noexcept { return *at<StepHistory>(header_->history); }
  /// The ring of a runner, or of another thread.
  SpanRing& runner_spans(int rank) noexcept { return span_ring(static_cast<std::uint64_t>(rank)); }
  SpanRing& spans(SpanThread thread) noexcept {
    return span_ring(header_->ranks + static_cast<std::uint64_t>(thread));
  }
  /// One of the span_rings(ranks()) rings.
  const SpanRing& span_ring(std::uint64_t ring) const noexcept { return at<SpanRing>(header_->spans)[ring]; }
  SpanRing& span_ring(std::uint64_t ring) noexcept { return at<SpanRing>(header_->spans)[ring]; }
  std::span<const std::byte> manifest() const noexcept {
    return {at<std::byte>(header_->manifest), header_->manifest_bytes};
  }
  std::span<std::byte> manifest() noexcept {
    return {at<std::byte>(header_->manifest), header_->manifest_bytes};
  }

  /// For each tensor: 1 if it was frozen at the start and unfrozen since. The host writes it while no attempt
  /// is open.
  std::span<const std::atomic<std::uint32_t>> unfrozen() const noexcept {
    return {at<std::atomic<std::uint32_t>>(header_->unfrozen), header_->tensors};
  }
  std::span<std::atomic<std::uint32_t>> unfrozen() noexcept {
    return {at<std::atomic<std::uint32_t>>(header_->unfrozen), header_->tensors};
  }

  /// One entry for each tensor. The host writes it while no attempt is open.
  std::span<const UpdatedTensor> updated() const noexcept {
    return {at<UpdatedTensor>(header_->updated), header_->tensors};
  }
  std::span<UpdatedTensor> updated() noexcept {
    return {at<UpdatedTensor>(header_->updated), header_->tensors};
  }
  /// How many committed attempts have updated each tensor.
  std::span<const Count> updates(std::uint32_t index) const noexcept {
    return {at<Count>(updates_at(index)), header_->tensors};
  }
  std::span<Count> updates(std::uint32_t index) noexcept {
    return {at<Count>(updates_at(index)), header_->tensors};
  }

  const Counters& counters(std::uint32_t index) const noexcept { return *at<Counters>(copy(index)); }
  Counters& counters(std::uint32_t index) noexcept { return *at<Counters>(copy(index)); }
  const std::byte* generator(std::uint32_t index, int rank) const noexcept {
    return at<std::byte>(generator_at(index, rank));
  }
  std::byte* generator(std::uint32_t index, int rank) noexcept {
    return at<std::byte>(generator_at(index, rank));
  }
  const std::byte* buffers(std::uint32_t index, int rank) const noexcept {
    return at<std::byte>(buffers_at(index, rank));
  }
  std::byte* buffers(std::uint32_t index, int rank) noexcept {
    return at<std::byte>(buffers_at(index, rank));
  }
  /// The master's buffers.
  const std::byte* result_buffers(std::uint32_t index) const noexcept { return buffers(index, ranks()); }
  std::byte* result_buffers(std::uint32_t index) noexcept { return buffers(index, ranks()); }

  /// The undo image of a part of the rank's slice: image_bytes bytes.
  std::byte* undo(int rank, int part = 0) noexcept {
    return at<std::byte>(header_->undo) + std::size_t(rank * max_parts + part) * image_bytes;
  }
  /// Changes whenever the reduction of the rank's slice moves on.
  std::uint64_t reduction_progress(int rank) const noexcept;
  const Queue& queue(int rank) const noexcept { return *at<Queue>(queue_at(rank)); }
  Queue& queue(int rank) noexcept { return *at<Queue>(queue_at(rank)); }
  const std::byte* parameters() const noexcept { return at<std::byte>(header_->parameters); }
  std::byte* parameters() noexcept { return at<std::byte>(header_->parameters); }
  const std::byte* gradients() const noexcept { return at<std::byte>(header_->gradients); }
  std::byte* gradients() noexcept { return at<std::byte>(header_->gradients); }
  /// The first moments of the parameters that are trained, then the second ones.
  const std::byte* moments() const noexcept { return at<std::byte>(header_->moments); }
  std::byte* moments() noexcept { return at<std::byte>(header_->moments); }
  /// Room for another copy of the parameters, if header().has_snapshot is 1.
  std::byte* snapshot() noexcept { return at<std::byte>(header_->snapshot); }

  /// Of each tensor.
  std::span<const Tag> tags(int rank) const noexcept { return tags_of(rank); }
  std::span<Tag> tags(int rank) noexcept { return tags_of(rank); }
  const std::byte* slab(int rank) const noexcept { return slab_of(rank); }
  std::byte* slab(int rank) noexcept { return slab_of(rank); }

 private:
  Session(std::vector<base::UniqueFd> fds, ipc::Mapping map, std::vector<ipc::Mapping> slabs,
          std::unique_ptr<const Header> header);
  struct Checked {
    ipc::Mapping map;
    std::unique_ptr<const Header> header;
  };
  static Checked map_checked(int fd, ipc::Access access);
  template <class T>
  T* at(std::uint64_t offset) const noexcept {
    return reinterpret_cast<T*>(map_.data() + offset);
  }
  SourceState& valid_source_state() const;
  Incident* incidents() const noexcept { return at<Incident>(header_->incidents); }
  static std::size_t place_of(std::uint64_t incident) noexcept { return (incident - 1) % max_incidents; }
  // Offsets.
  std::uint64_t copy(std::uint32_t index) const noexcept {
    return header_->copies + index * header_->copy_bytes;
  }
  std::uint64_t updates_at(std::uint32_t index) const noexcept {
    return copy(index) + align_up(sizeof(Counters), region_alignment);
  }
  std::uint64_t generator_at(std::uint32_t index, int rank) const noexcept {
    return updates_at(index) + align_up(header_->tensors * sizeof(Count), region_alignment) +
           std::size_t(rank) * generator_bytes;
  }
  std::uint64_t buffers_at(std::uint32_t index, int rank) const noexcept {
    return generator_at(index, ranks()) + std::size_t(rank) * header_->buffer_bytes;
  }
  std::uint64_t queue_at(int rank) const noexcept {
    return header_->queues + std::uint64_t(rank) * header_->queue_bytes;
  }
  std::byte* slab_of(int rank) const noexcept {
    return slabs_[static_cast<std::size_t>(rank)].data() + header_->slab_data_offset;
  }
  std::span<Tag> tags_of(int rank) const noexcept;

  std::vector<base::UniqueFd> fds_;
  ipc::Mapping map_;
  ipc::PrivateInChildren private_in_children_;  ///< Declared after the mapping that it uses.
  std::vector<ipc::Mapping> slabs_;
  std::unique_ptr<const Header>
      header_;  ///< A private copy: other processes cannot change it after it was checked.
};

/// Returns read(counters) of the valid copy. Reads again if the copy did not stay valid meanwhile: a copy is
/// written again two attempts later.
template <class Read>
auto read_counters(const Session& session, Read read) noexcept {
  for (;;) {
    const auto word = session.word();
    auto found = read(session.counters(word.index));
    if (session.word().attempt == word.attempt) return found;
  }
}

}  // namespace accelmgr::session
