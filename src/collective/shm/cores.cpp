#include "collective/shm/cores.hpp"

#include <sched.h>

#include <limits>

namespace accelmgr::collective::shm {

int cores_of_this_process() noexcept {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0)
    return std::numeric_limits<int>::max();  // More than a cpu_set_t can name.
  return CPU_COUNT(&cores);
}

void note_own_cores(std::span<std::atomic<std::uint64_t>> cores) noexcept {
  cpu_set_t own;
  CPU_ZERO(&own);
  if (sched_getaffinity(0, sizeof own, &own) != 0) CPU_ZERO(&own);
  for (std::size_t word = 0; word < cores.size(); ++word) {
    std::uint64_t bits = 0;
    for (std::size_t bit = 0; bit < 64; ++bit)
      if (CPU_ISSET(word * 64 + bit, &own)) bits |= std::uint64_t{1} << bit;
    cores[word].store(bits, std::memory_order_relaxed);
  }
}

}  // namespace accelmgr::collective::shm
