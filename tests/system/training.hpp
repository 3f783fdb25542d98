// A training loop over a manager, as hosts have one: the optimizer, updates of several steps, checkpoints,
// and what a later loop must end with alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "accelmgr/manager.hpp"
#include "accelmgr/optimizer.hpp"

namespace accelmgr::test {

/// An update every so many steps.
constexpr std::int64_t steps_per_update = 2;

/// The copies of all that training goes on from.
struct Outcome {
  std::vector<at::Tensor> parameters, gradients, buffers, optimizer;
  std::uint64_t steps = 0, samples = 0, elements = 0;
  std::vector<std::uint64_t> samples_of_ranks;
};
void expect_same(const Outcome& actual, const Outcome& expected);

class Training {
 public:
  /// Starts a manager, and goes on where `checkpoint.resume` says.
  explicit Training(const Config& config);

  Manager& manager() { return manager_; }
  /// Returns when so many steps are committed in all.
  void train(std::uint64_t steps);
  /// Returns when the checkpoint has reached the disk: its path.
  std::string save();
  /// SIGKILL to the process of a rank.
  void kill_runner(int rank);
  Outcome outcome() const;

 private:
  Manager manager_;
  Optimizer optimizer_;
};

}  // namespace accelmgr::test
