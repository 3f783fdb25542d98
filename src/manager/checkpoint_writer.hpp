// Writes checkpoints in the manager, so that the host's step waits for no disk: one after the other, on a
// thread of its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

#include "accelmgr/config.hpp"
#include "base/clock.hpp"
#include "protocol/messages.hpp"

namespace accelmgr::manager {

class CheckpointWriter {
 public:
  using Tell = std::function<void(protocol::Saved)>;
  /// `tell` is called on the writer's thread. The thread begins with the first checkpoint and ends with the
  /// process, which must not unwind before: a disk may keep it for ever.
  CheckpointWriter(const CheckpointConfig& config, Tell tell) : config_(config), tell_(std::move(tell)) {}

  /// Returns at once.
  void write(protocol::Save save);
  /// Returns when all that was asked for is written, or the deadline has passed: whether it is written.
  bool finish(base::Deadline deadline);

 private:
  [[noreturn]] void run();

  const CheckpointConfig& config_;
  Tell tell_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<protocol::Save> queue_;  ///< The first is being written.
  bool started_ = false;
};

}  // namespace accelmgr::manager
