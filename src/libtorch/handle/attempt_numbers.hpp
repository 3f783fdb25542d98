// Loss and scalars of an attempt, summed over its micro-batches. Those that are tensors stay tensors until
// the end: a device may still compute them.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/model.hpp"
#include "engine/replica/replica.hpp"

namespace accelmgr::libtorch {

class AttemptNumbers {
 public:
  void clear();
  /// Adds loss and scalars of a micro-batch. The loss is divided already. Throws ModelError for a scalar that
  /// is no tensor of one element.
  void add(const Outputs& outputs, double divisor);

  /// The tensors whose values totals() needs.
  const std::vector<at::Tensor>& tensors() const noexcept { return tensors_; }
  /// `values`: of tensors(), in that order.
  replica::Totals totals(std::span<const double> values) const;

 private:
  /// What a tensor adds to.
  struct Part {
    std::ptrdiff_t scalar = -1;  ///< An index of scalars_; -1: the loss.
    double divisor = 1;
  };

  std::size_t scalar(const std::string& name);

  std::vector<at::Tensor> tensors_;
  std::vector<Part> parts_;  ///< Of each tensor.
  std::vector<std::pair<std::string, double>> scalars_;
};

}  // namespace accelmgr::libtorch
