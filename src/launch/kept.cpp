#include "launch/kept.hpp"

#include <cstdlib>
#include <mutex>
#include <vector>

#include "base/log.hpp"
#include "launch/per_process.hpp"
#include "launch/processes.hpp"

namespace accelmgr::launch {
namespace {

struct Kept {
  std::mutex mutex;
  std::vector<std::unique_ptr<SpawnContext::Processes>> contexts;
  bool at_exit = false;  ///< They have been waited for.
};

void wait_for(SpawnContext::Processes& processes) noexcept {
  try {
    while (!processes.join(base::Deadline::at_ns(INT64_MAX))) {
    }
  } catch (const std::exception& error) {
    base::log().error("of processes that nobody joined: {}", error.what());
  }
}

}  // namespace

void prepare_to_keep() {
  base::log();  // First: it must be there when those that are kept are waited for.
  static const int registered = std::atexit([] {
    {
      auto& kept = of_this_process<Kept>();
      const std::lock_guard lock(kept.mutex);
      kept.at_exit = true;
    }
    end_kept_contexts();
  });
  static_cast<void>(registered);
}

void keep(std::unique_ptr<SpawnContext::Processes> processes) noexcept {
  auto& kept = of_this_process<Kept>();
  std::unique_lock lock(kept.mutex);
  if (!kept.at_exit) {
    kept.contexts.push_back(std::move(processes));
    return;
  }
  lock.unlock();
  wait_for(*processes);
}

void end_kept_contexts() noexcept {
  auto& kept = of_this_process<Kept>();
  std::vector<std::unique_ptr<SpawnContext::Processes>> contexts;
  {
    const std::lock_guard lock(kept.mutex);
    contexts.swap(kept.contexts);
  }
  for (const auto& processes : contexts) wait_for(*processes);
}

}  // namespace accelmgr::launch
