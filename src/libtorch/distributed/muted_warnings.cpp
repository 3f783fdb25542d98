#include "libtorch/distributed/muted_warnings.hpp"

#include <c10/util/Logging.h>

#include <mutex>

namespace accelmgr::distributed {
namespace {

constexpr int errors_only = 2;

// The log level belongs to the whole process. The first object raises it to errors, the last one restores it.
std::mutex mutex;
int count = 0;
int level_before = 0;

}  // namespace

MutedWarnings::MutedWarnings() {
  const std::lock_guard lock(mutex);
  if (count++ > 0) return;
  level_before = FLAGS_caffe2_log_level;
  if (level_before < errors_only) FLAGS_caffe2_log_level = errors_only;
}

MutedWarnings::~MutedWarnings() {
  const std::lock_guard lock(mutex);
  if (--count == 0) FLAGS_caffe2_log_level = level_before;
}

}  // namespace accelmgr::distributed
