// A process's view of a session: its mappings, and typed access to what layout.hpp places there.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/unique_fd.hpp"
#include "ipc/memory.hpp"
#include "session/layout.hpp"

namespace accelmgr::session {

/// Bounds on what a session may take: `bytes`, all of it, by `limit_bytes` (0: none), and `more_bytes`, those
/// that it has not yet, by what the machine has available. Throws SessionError with the bytes needed and
/// available.
void check_memory(std::uint64_t bytes, std::uint64_t limit_bytes, std::uint64_t more_bytes);
inline void check_memory(std::uint64_t bytes, std::uint64_t limit_bytes) {
  check_memory(bytes, limit_bytes, bytes);
}

class Session {
 public:
  /// Makes the memfds and populates them, of the slabs the first `ranks`. The header is complete but for its
  /// magic: publish() stores that, once the manifest and the initial values are written. Throws SessionError.
  static Session create(const Extent& extent, int ranks, int populate_threads);
  /// Maps a session made by another process: `fds` as fds() gives them. With `protect_for_rank` >= 0 the
  /// parameters and the slabs of other ranks are mapped read-only. Throws SessionError on a stranger's
  /// memory.
  static Session attach(std::vector<base::UniqueFd> fds, int protect_for_rank = -1,
                        bool protect_parameters = false);

  void publish() noexcept;
  /// Gives the slab of a rank its memory, if it has none yet, and makes it present in this process, unless
  /// `populate_threads` is 0. Throws SessionError.
  void allocate_slab(int rank, int populate_threads = 0) const;
  /// Makes every page that `rank` touches in a step of `team` present in this process: no step waits for page
  /// faults.
  void populate_for(int rank, RankMask team) const;
  /// From now on a forked child has none of the mappings, and ends where it uses them. For processes in which
  /// code of the user forks.
  void keep_from_children() const;
  /// The session memfd, then the slab of each rank.
  std::vector<int> fds() const;

  const Header& header() const noexcept { return *header_; }
  int ranks() const noexcept { return static_cast<int>(header_->ranks); }
  Control& control() const noexcept { return *at<Control>(header_->control); }
  StepWord word() const noexcept { return load(control().word); }
  RankRecord& record(int rank) const noexcept { return at<RankRecord>(header_->records)[rank]; }
  Dealing& dealing() const noexcept { return *at<Dealing>(header_->dealing); }
  /// Incident `number`, counted from 1; one of the last max_incidents.
  Incident& incident(std::uint64_t number) const noexcept {
    return at<Incident>(header_->incidents)[(number - 1) % max_incidents];
  }
  std::span<std::byte> manifest() const noexcept {
    return {at<std::byte>(header_->manifest), header_->manifest_bytes};
  }

  Counters& counters(std::uint32_t index) const noexcept { return *reinterpret_cast<Counters*>(copy(index)); }
  std::byte* generator(std::uint32_t index, int rank) const noexcept;
  std::byte* buffers(std::uint32_t index, int rank) const noexcept;
  /// The master's buffers.
  std::byte* result_buffers(std::uint32_t index) const noexcept;

  std::byte* undo(int rank) const noexcept {
    return at<std::byte>(header_->undo) + std::size_t(rank) * chunk_bytes;
  }
  Queue& queue(int rank) const noexcept {
    return *at<Queue>(header_->queues + std::uint64_t(rank) * header_->queue_bytes);
  }
  std::byte* parameters() const noexcept { return at<std::byte>(header_->parameters); }
  std::byte* gradients() const noexcept { return at<std::byte>(header_->gradients); }
  std::size_t master_bytes() const noexcept { return header_->elements * bytes_of(header_->element); }

  /// The attempt that last wrote each tensor of the rank's slab.
  std::span<std::atomic<std::uint64_t>> tags(int rank) const noexcept;
  std::byte* slab(int rank) const noexcept {
    return slabs_[static_cast<std::size_t>(rank)].data() + header_->slab_data_offset;
  }

  /// Wakes everyone who waits for anything in this session.
  void wake_everyone() const noexcept;

 private:
  Session(std::vector<base::UniqueFd> fds, ipc::Mapping map, std::vector<ipc::Mapping> slabs);
  template <class T>
  T* at(std::uint64_t offset) const noexcept {
    return reinterpret_cast<T*>(map_.data() + offset);
  }
  std::byte* copy(std::uint32_t index) const noexcept {
    return at<std::byte>(header_->copies + index * header_->copy_bytes);
  }

  std::vector<base::UniqueFd> fds_;
  ipc::Mapping map_;
  std::vector<ipc::Mapping> slabs_;
  Header* header_;
};

}  // namespace accelmgr::session
