// A host's training loop over a manager: an optimizer, updates after several steps, checkpoints, and the
// outcome that a resumed loop must reach too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support.hpp"

namespace accelmgr::test {

/// The parameters are updated after this many steps.
constexpr std::int64_t steps_per_update = 2;

/// Copies of the state from which training goes on.
struct Outcome {
  Tensors parameters, gradients, buffers, optimizer;
  std::uint64_t steps = 0, samples = 0, elements = 0;
  std::vector<std::uint64_t> samples_of_ranks;
};
void expect_same(const Outcome& actual, const Outcome& expected);

/// Gradient descent with momentum on float32 parameters.
class Training {
 public:
  /// Starts a manager, and resumes as `checkpoint.resume` says.
  explicit Training(const Config& config);

  client::Handle& manager() { return manager_; }
  /// Trains until `steps` steps are committed in all.
  void train(std::uint64_t steps);
  /// Saves a checkpoint. Returns its path when it is on the disk.
  std::string save();
  /// Sends SIGKILL to the runner of `rank`.
  void kill_runner(int rank);
  Outcome outcome() const;

 private:
  void update();

  client::Handle manager_;
  Tensors momentum_;
};

}  // namespace accelmgr::test
