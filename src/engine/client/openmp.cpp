#include "engine/client/openmp.hpp"

#include <dlfcn.h>

namespace accelmgr::client {

void release_idle_threads() noexcept {
  // OpenMP 5.0, section 3.2.44. Looked up at run time: the libgomp that torch brings is not linked here.
  constexpr int omp_pause_soft = 1;
  using Pause = int (*)(int);
  static const auto pause_all = reinterpret_cast<Pause>(dlsym(RTLD_DEFAULT, "omp_pause_resource_all"));
  if (pause_all != nullptr) pause_all(omp_pause_soft);
}

namespace {

using SetThreads = void (*)(int);
using MaxThreads = int (*)();

SetThreads set_threads() noexcept {
  static const auto call = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  return call;
}

}  // namespace

OneThread::OneThread(bool engage) noexcept {
  static const auto max_threads = reinterpret_cast<MaxThreads>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
  if (!engage || max_threads == nullptr || set_threads() == nullptr) return;
  threads_before_ = max_threads();
  set_threads()(1);
}

OneThread::~OneThread() {
  if (threads_before_ != 0) set_threads()(threads_before_);
}

}  // namespace accelmgr::client
