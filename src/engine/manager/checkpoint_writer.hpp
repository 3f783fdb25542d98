// Writes checkpoints in the manager, one after the other, on a thread of its own: no step of the host waits
// for a disk.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "accelmgr/config.hpp"
#include "base/clock.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "engine/protocol/messages.hpp"
#include "engine/session/spans.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::manager {

class CheckpointWriter {
 public:
  using Tell = std::function<void(protocol::Saved)>;
  /// `tell` is called on the writer's thread, after each checkpoint that was written or failed. The thread
  /// begins with the first checkpoint and never ends, because a disk may block it for ever: `config` and this
  /// object must live until the process ends by _exit().
  /// `confine`: of a service. It writes only to and below `checkpoint.directory`, whatever a host asks for,
  /// and calls this before each checkpoint, on its thread; what that throws is why it was not written.
  CheckpointWriter(const CheckpointConfig& config, const session::CheckpointView& view, Tell tell,
                   std::function<void()> confine = {})
      : config_(config), spans_(view.spans()), tell_(std::move(tell)), confine_(std::move(confine)) {}

  /// Queues a checkpoint. Does not block. Any thread. Throws SystemError when there is no thread to be had;
  /// nothing is queued then.
  void write(protocol::Save save);
  /// Blocks until every queued checkpoint is written or has failed, or the deadline has passed. Returns false
  /// in the latter case. Any thread but the writer's.
  bool finish(base::Deadline deadline);
  /// The last checkpoint in `checkpoint.directory`; null if there is none, and unless it is confined. Any
  /// thread.
  std::shared_ptr<const checkpoint::HostFiles> last() const;
  /// Call it with the checkpoint from which the run goes on. Throws CheckpointError.
  void begin_with(const std::string& path);

 private:
  [[noreturn]] void run();

  const CheckpointConfig& config_;
  session::SpanWriter spans_;
  Tell tell_;
  std::function<void()> confine_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<protocol::Save> queue_;  ///< The front is being written.
  bool started_ = false;
  std::shared_ptr<const checkpoint::HostFiles> last_;
};

}  // namespace accelmgr::manager
