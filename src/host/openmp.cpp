#include "host/openmp.hpp"

#include <dlfcn.h>

namespace accelmgr::host {

void release_idle_threads() noexcept {
  // OpenMP 5.0, section 3.2.44. Looked up: torch brings its own libgomp, which is not ours to link.
  constexpr int omp_pause_soft = 1;
  using Pause = int (*)(int);
  static const auto pause_all = reinterpret_cast<Pause>(dlsym(RTLD_DEFAULT, "omp_pause_resource_all"));
  if (pause_all != nullptr) pause_all(omp_pause_soft);
}

}  // namespace accelmgr::host
