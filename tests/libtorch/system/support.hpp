// What tests of whole systems share: a small configuration, models and data sources, and one process that
// computes what N runners compute, as a reference.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/manager.hpp"
#include "accelmgr/model.hpp"
#include "engine/support/expectations.hpp"
#include "message_of.hpp"

namespace accelmgr::test {

/// Registers a model before main() begins, because init() needs it. Test files have it as a constant.
struct RegisteredModel {
  RegisteredModel(const std::string& name, ModelFactory factory) { register_model(name, std::move(factory)); }
};
struct RegisteredData {
  RegisteredData(const std::string& name, DataFactory factory) { register_data(name, std::move(factory)); }
};

/// A config with small shapes of every built-in model without dropout, and two runners of one thread each.
/// Its time limits make a test fail before ctest ends it. The data are `synthetic`, or for other models one
/// of
///   `vectors`: input float32 [4], target int64 below 3
///   `numbered`: number int64, the element's number; input float64 [4]
/// Both have data.elements elements (64 if 0), in order, data.epochs times (0: endless).
Config small_config(const std::string& model_kind);

/// The next element of a source as a batch of one; none at the end of the data.
std::optional<std::vector<NamedTensor>> next_element(BatchSource& source);

/// One process that computes alone what N runners compute together. It has a replica for each rank, because
/// each rank has its own BatchNorm statistics. Element i of the same data goes to rank i mod N.
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

  /// The mean over the next N x A micro-batches, or over those that are left. `parameters` have the order of
  /// Manager::parameters().
  Step step(const std::vector<at::Tensor>& parameters);
  /// The buffers of a rank's replica.
  std::vector<NamedTensor> buffers(int rank) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Copies of the tensors, in the same order.
std::vector<at::Tensor> copies(const std::vector<NamedTensor>& tensors);
/// The address of each tensor.
std::vector<const void*> addresses(const std::vector<NamedTensor>& tensors);

/// The largest distance between tensors at the same place, relative to the norm of the expected one. If that
/// norm is zero, the distance of any other tensor is infinite.
double distance(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected);
/// True if all tensors have the same bits.
bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

/// What inner steps have trained. Equal ones have the same bits.
struct Trained {
  std::vector<at::Tensor> parameters, state;
  std::vector<double> losses;

  explicit Trained(Manager& manager, std::vector<double> l = {})
      : parameters(copies(manager.parameters())),
        state(copies(manager.optimizer_state())),
        losses(std::move(l)) {}
  bool operator==(const Trained& other) const {
    return same_bits(parameters, other.parameters) && same_bits(state, other.state) && losses == other.losses;
  }
};

}  // namespace accelmgr::test
