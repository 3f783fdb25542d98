// Writes checkpoints in the manager, so that the host's step waits for no disk: one after the other, on a
// thread of its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "accelmgr/config.hpp"
#include "protocol/messages.hpp"

namespace accelmgr::manager {

class CheckpointWriter {
 public:
  using Tell = std::function<void(protocol::Saved)>;
  /// `tell` is called on the writer's thread. The thread begins with the first checkpoint.
  CheckpointWriter(const CheckpointConfig& config, Tell tell) : config_(config), tell_(std::move(tell)) {}
  ~CheckpointWriter() { finish(); }

  /// Returns at once.
  void write(protocol::Save save);
  /// Blocks until all that was asked for is written; nothing may be asked for afterwards.
  void finish();

 private:
  void run();

  const CheckpointConfig& config_;
  Tell tell_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<protocol::Save> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace accelmgr::manager
