// The model that the replicas of tests compute: plain C++ with a backward pass of its own. Training it needs
// no tensor library.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/dtype.hpp"
#include "engine/replica/replica.hpp"

namespace accelmgr::test {

/// A parameter or a buffer. Until bind_values() is called, the values are in memory that the variable owns.
struct Variable {
  std::string name{};
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape{};
  std::vector<std::int64_t> strides{};  ///< In elements.
  std::byte* values = nullptr;
  std::vector<std::string> aliases{};  ///< Further names of the same variable.
  bool requires_grad = true;
  std::vector<std::byte> own{};
  std::vector<std::byte> gradient{};  ///< In the order that TensorEntry::gradient_strides() says;
                                      ///< set by backward() if `used` is true.
  bool used = false;

  std::size_t elements() const;
  void bind_values(const replica::Place& place);
  /// Adds the gradient to a sum of the same dtype, or stores it there.
  void sum_gradient(std::byte* sum, bool add) const;
};

/// Not thread-safe, except for cancel() and cancelled().
class Network {
 public:
  struct Output {
    double loss = 0;
    std::vector<std::pair<std::string, double>> scalars{};
  };

  Network() = default;
  virtual ~Network() = default;
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  /// Updates the buffers, and may draw from the generator.
  virtual Output forward(std::span<const replica::Field> batch) = 0;
  /// Computes the gradients of the last forward()'s loss times `scale`. Sets `used` and `gradient` of each
  /// parameter that requires a gradient.
  virtual void backward(double scale) = 0;

  /// Whether backward() computes a gradient of that parameter for this batch. May be called while forward()
  /// or backward() run.
  virtual bool uses(std::size_t parameter, std::span<const replica::Field>) const {
    return parameters_[parameter].requires_grad;
  }

  std::vector<Variable>& parameters() { return parameters_; }
  std::vector<Variable>& buffers() { return buffers_; }
  std::mt19937_64& generator() { return generator_; }

  /// All parameters and buffers, with all names of each.
  replica::Description description();
  /// If true, the result is no longer needed: forward() and backward() may return early, with any result.
  virtual void cancel(bool cancelled) { cancelled_ = cancelled; }
  bool cancelled() const { return cancelled_; }

 protected:
  /// Adds a variable of zeros. The reference is valid until the next variable is added.
  Variable& add_parameter(const std::string& name, DType dtype, std::vector<std::int64_t> shape);
  Variable& add_buffer(const std::string& name, DType dtype, std::vector<std::int64_t> shape);

 private:
  std::atomic<bool> cancelled_ = false;
  std::vector<Variable> parameters_, buffers_;
  std::mt19937_64 generator_;
};

/// The field of that name. Throws ModelError if the batch has none.
const replica::Field& field_of(std::span<const replica::Field> batch, const std::string& name);

}  // namespace accelmgr::test
