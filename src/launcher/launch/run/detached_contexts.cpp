#include "launcher/launch/run/detached_contexts.hpp"

#include <cstdlib>
#include <mutex>
#include <vector>

#include "base/ipc/process_local.hpp"
#include "base/log.hpp"
#include "launcher/launch/run/processes.hpp"

namespace accelmgr::launch {
namespace {

struct DetachedContexts {
  std::mutex mutex;
  std::vector<std::unique_ptr<SpawnContext::Processes>> contexts;
  bool at_exit = false;  ///< The wait at exit has begun.
};

void wait_for(SpawnContext::Processes& processes) noexcept {
  try {
    while (!processes.join(base::Deadline::at_ns(INT64_MAX))) {
    }
  } catch (const std::exception& error) {
    base::log().error("a launch that was never joined failed: {}", error.what());
  }
}

}  // namespace

void prepare_detached_contexts() {
  base::log();  // Made before std::atexit(), so destroyed after the wait, which logs.
  static const int registered = std::atexit([] {
    {
      auto& detached = ipc::process_local<DetachedContexts>();
      const std::lock_guard lock(detached.mutex);
      detached.at_exit = true;
    }
    join_detached_contexts();
  });
  static_cast<void>(registered);
}

void detach(std::unique_ptr<SpawnContext::Processes> processes) noexcept {
  auto& detached = ipc::process_local<DetachedContexts>();
  std::unique_lock lock(detached.mutex);
  if (!detached.at_exit) {
    detached.contexts.push_back(std::move(processes));
    return;
  }
  lock.unlock();
  wait_for(*processes);
}

void join_detached_contexts() noexcept {
  auto& detached = ipc::process_local<DetachedContexts>();
  std::vector<std::unique_ptr<SpawnContext::Processes>> contexts;
  {
    const std::lock_guard lock(detached.mutex);
    contexts.swap(detached.contexts);
  }
  for (const auto& processes : contexts) wait_for(*processes);
}

}  // namespace accelmgr::launch
