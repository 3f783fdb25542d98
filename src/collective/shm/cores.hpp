// Which cores ranks may run on.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

namespace accelmgr::collective::shm {

int cores_of_this_process() noexcept;

/// Stores the cores on which the calling thread may run, one bit each; all zeros when there are more than a
/// cpu_set_t can name.
void note_own_cores(std::span<std::atomic<std::uint64_t>> cores) noexcept;

}  // namespace accelmgr::collective::shm
