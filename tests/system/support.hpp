// What the tests of whole systems share: a small configuration, models and data sources of their own, and the
// arithmetic of N runners in one process, to compare with.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/manager.hpp"
#include "accelmgr/model.hpp"
#include "message_of.hpp"

namespace accelmgr::test {

/// Registers before main() begins, as init() needs it: what a test trains stands beside the test, as a
/// constant of its file.
struct RegisteredModel {
  RegisteredModel(const std::string& name, ModelFactory factory) { register_model(name, std::move(factory)); }
};
struct RegisteredData {
  RegisteredData(const std::string& name, DataFactory factory) { register_data(name, std::move(factory)); }
};

/// Small shapes of every built-in model without dropout, two runners of one thread each, and time limits that
/// make a test fail before ctest ends it. Data: `synthetic`, or for other models one of
///   `vectors`: input float32 [4], target int64 below 3
///   `numbered`: number int64, that of the element; input float64 [4]
/// Both hold data.elements elements (64 if 0), in order, data.epochs times (0: endless).
Config small_config(const std::string& model_kind);

/// One process that computes by itself what N runners compute together: one replica for each rank, as
/// BatchNorm is the rank's own; element i of the same data goes to rank i mod N.
class Reference {
 public:
  struct Step {
    double loss = 0;
    std::uint64_t samples = 0;  ///< 0: the data has ended.
    std::map<std::string, double> scalars;
    std::vector<at::Tensor> gradients;  ///< In the order of Manager::parameters().
  };

  explicit Reference(const Config& config);
  ~Reference();

  /// Mean over the next N x A micro-batches, or those that are left, with `parameters` in the order of
  /// Manager::parameters().
  Step step(const std::vector<at::Tensor>& parameters);
  /// What `rank`'s replica has made of its buffers.
  std::vector<NamedTensor> buffers(int rank) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Copies, in the same order.
std::vector<at::Tensor> copies(const std::vector<NamedTensor>& tensors);
/// Where each tensor lies.
std::vector<const void*> addresses(const std::vector<NamedTensor>& tensors);

/// The largest distance of two tensors of the same place, as a share of the norm of `expected`'s. Where that
/// is zero, all but zero is infinitely far.
double distance(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected);
/// Whether all tensors have the same bits.
bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

/// A step that must succeed; a failure is reported with its error.
StepResult expect_ok(Manager& manager, const StepOptions& options = {});

}  // namespace accelmgr::test
