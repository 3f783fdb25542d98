// A perceptron with everything that the engine must get right: BatchNorm's buffers, dropout's random numbers,
// tied weights, a frozen parameter, a parameter that some batches do not use, and float32 or float64.
#pragma once

#include <limits>
#include <memory>

#include "engine/support/network.hpp"

namespace accelmgr::test {

enum class Tie {
  none,
  identity,  ///< The decoder's weight is the encoder's, transposed: one parameter with two names.
  storage,   ///< The decoder's weight is another parameter over the same memory, with its own gradient.
};

struct PerceptronShape {
  DType dtype = DType::float32;
  std::int64_t inputs = 32, hidden = 96;
  int layers = 1;  ///< Each has a weight of [hidden, hidden].
  double dropout = 0.2;
  Tie tie = Tie::identity;
  std::uint64_t seed = 0;  ///< The seed of the initial values.
  /// Gradients beyond it are infinite, as they are beyond 65504 in float16.
  double gradient_limit = std::numeric_limits<double>::infinity();
};

/// rare.bias has a gradient only in batches whose first "index" is a multiple of this number.
constexpr std::int64_t rare_every = 4;

/// Learns to reproduce "input", float [inputs]; "index" is int64. It reports one scalar, "output": the mean
/// of its output.
///
///   encoder.weight [hidden, inputs], encoder.bias, norm.weight, norm.bias, layer<i>.weight, layer<i>.bias,
///   decoder.weight [hidden, inputs] (as a tensor over the encoder's storage: [inputs, hidden]),
///   decoder.bias, rare.bias, scale (frozen)
///   norm.running_mean, norm.running_var, batches (int64)
std::unique_ptr<Network> make_perceptron(const PerceptronShape& shape);

}  // namespace accelmgr::test
