#include "ipc/cores.hpp"

#include <sched.h>

#include <algorithm>
#include <memory>

namespace accelmgr::ipc {

// Grows the set, because the default size is too small on machines with more than 1024 cores.
int allowed_cores() {
  for (std::size_t cores = CPU_SETSIZE; cores <= (1u << 20); cores *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(cores),
                                                               [](cpu_set_t* s) { CPU_FREE(s); });
    const auto bytes = CPU_ALLOC_SIZE(cores);
    if (set != nullptr && ::sched_getaffinity(0, bytes, set.get()) == 0)
      return std::max(1, CPU_COUNT_S(bytes, set.get()));
  }
  return 1;
}

}  // namespace accelmgr::ipc
