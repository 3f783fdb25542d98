// The interface of a model replica, and the registry by which all processes find the same model.
//
// Objects and closures do not cross into the manager and the runners, names do: register a factory before
// accelmgr::init(), which is where those processes branch off.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/named_tensor.hpp"

namespace accelmgr {

/// One micro-batch: its fields in the order in which the data source declared them; dimension 0 is the batch.
/// The tensors are the model's own: it may change and keep them.
class Batch {
 public:
  explicit Batch(std::vector<NamedTensor> fields) : fields_(std::move(fields)) {}
  const std::vector<NamedTensor>& fields() const noexcept { return fields_; }
  /// Throws ModelError that lists the fields there are.
  const at::Tensor& operator[](const std::string& name) const;

 private:
  std::vector<NamedTensor> fields_;
};

/// `loss`: a scalar (0-d or one element, floating point) that requires grad while training.
/// `scalars`: any other numbers; they arrive in StepResult, averaged like the loss. At most 16, names of at
/// most 47 bytes.
struct Outputs {
  at::Tensor loss{};
  std::vector<std::pair<std::string, double>> scalars{};
};

/// One replica of a model. Used by one thread. parameters() and buffers() return the same tensor objects at
/// every call: accelmgr points the parameters' storage at the master's memory (`set_data`), so a model must
/// not replace them; a step in which it did fails with ModelError.
class Model {
 public:
  virtual ~Model() = default;
  /// Leaves; floating point, all of one dtype (float32 or float64). Tied weights may be listed under each
  /// name.
  virtual std::vector<NamedTensor> parameters() = 0;
  /// State that forward() changes and that is no parameter (BatchNorm statistics). May be empty.
  virtual std::vector<NamedTensor> buffers() = 0;
  /// Names of those that are not part of the state dict; checkpoints keep them for each runner alone.
  virtual std::vector<std::string> non_persistent_buffers() const { return {}; }
  /// What it throws fails the step. An error of torch, or a ModelError, is not tried again: with the same
  /// batch it would come again.
  virtual Outputs forward(const Batch& batch) = 0;
  /// Switches dropout and BatchNorm between training and evaluation.
  virtual void train(bool on) = 0;
};

/// Builds one replica; initial values come from torch's default generator, which the caller has seeded.
using ModelFactory = std::function<std::unique_ptr<Model>(const Config&)>;

/// Throws UsageError when the name is taken. Not thread-safe; call it before init().
void register_model(const std::string& name, ModelFactory factory);

/// `config.model.kind` by name: a built-in model or a registered one. Throws ConfigError that names the
/// nearest known kind, ModelError when the factory fails.
std::unique_ptr<Model> make_model(const Config& config);

/// Names of the built-in and the registered models, sorted.
std::vector<std::string> model_kinds();

}  // namespace accelmgr
