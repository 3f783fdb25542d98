// The outcome of writing a checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace accelmgr {

/// The outcome of writing one checkpoint.
struct CheckpointWritten {
  std::uint64_t step = 0;
  std::string path{};
  std::uint64_t bytes = 0;
  double copy_ms = 0;   ///< Time that save_checkpoint() blocked the host.
  double write_ms = 0;  ///< Time that the manager took to write it, in the background.
  std::string error{};  ///< Empty when the checkpoint has reached the disk.
  std::vector<std::string> warnings{};
};

}  // namespace accelmgr
