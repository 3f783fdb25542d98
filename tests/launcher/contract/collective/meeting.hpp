// A page of memory that all ranks of a test share: they meet there without the communicator under test.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/ipc/epoch.hpp"
#include "base/ipc/memory.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::collective::contract {

inline constexpr int most_ranks = 16;

/// Each rank has one of its own, over the same memory.
class Meeting {
 public:
  static base::UniqueFd create();
  explicit Meeting(int fd);

  /// Blocks until `ranks` ranks have called it. All of them must have called it equally often before. Throws
  /// std::runtime_error if not all come within 30 s.
  void meet(int ranks);

  /// Adds one to a number that is 0 at first; returns the sum.
  std::uint64_t count() noexcept { return page().counted.fetch_add(1) + 1; }
  std::uint64_t counted() const noexcept { return page().counted.load(); }

  /// Notes the time and kills this process with SIGKILL.
  [[noreturn]] void die(int rank) noexcept;
  /// The time at which a rank called die(); 0 if it did not.
  std::int64_t died_ns(int rank) const noexcept {
    return page().died_ns[static_cast<std::size_t>(rank)].load();
  }

 private:
  struct Page {
    ipc::Epoch came;
    std::atomic<std::uint64_t> counted;
    std::array<std::atomic<std::int64_t>, most_ranks> died_ns;
  };
  Page& page() const noexcept { return *reinterpret_cast<Page*>(mapping_.data()); }

  ipc::Mapping mapping_;
  std::uint32_t awaited_ = 0;
};

}  // namespace accelmgr::collective::contract
