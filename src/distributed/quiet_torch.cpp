#include "distributed/quiet_torch.hpp"

#include <c10/util/Logging.h>

#include <mutex>

namespace accelmgr::distributed {
namespace {

constexpr int errors_only = 2;

// The level is one for the whole process: the first to come lowers it, the last to go puts it back.
std::mutex mutex;
int count = 0;
int level_before = 0;

}  // namespace

QuietTorch::QuietTorch() {
  const std::lock_guard lock(mutex);
  if (count++ > 0) return;
  level_before = FLAGS_caffe2_log_level;
  if (level_before < errors_only) FLAGS_caffe2_log_level = errors_only;
}

QuietTorch::~QuietTorch() {
  const std::lock_guard lock(mutex);
  if (--count == 0) FLAGS_caffe2_log_level = level_before;
}

}  // namespace accelmgr::distributed
