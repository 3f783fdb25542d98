// The interface of a model replica, and the registry by which all processes find the same model.
//
// Objects and closures cannot be passed to the manager and the runners; names can. Register a factory before
// accelmgr::init(): the manager runs this program again up to that call.
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

/// One micro-batch: its fields in the order that the data source declared. Dimension 0 is the batch. The
/// tensors are copies for the model, which may change and keep them. They are on the device that computes.
class Batch {
 public:
  explicit Batch(std::vector<NamedTensor> fields) : fields_(std::move(fields)) {}
  const std::vector<NamedTensor>& fields() const noexcept { return fields_; }
  /// Throws ModelError, which lists the fields, when there is no such field.
  const at::Tensor& operator[](const std::string& name) const;

 private:
  std::vector<NamedTensor> fields_;
};

/// `loss`: a floating-point scalar (0-d or one element) that requires grad while training.
/// `scalars`: other numbers to report. StepResult has them, averaged like the loss. At most 16, with names of
/// at most 47 bytes.
/// `scalar_tensors`: more of them, as tensors of one element. They are read when the step is computed, so a
/// device need not wait for them in forward(), as it does for item().
struct Outputs {
  at::Tensor loss{};
  std::vector<std::pair<std::string, double>> scalars{};
  std::vector<NamedTensor> scalar_tensors{};
};

/// One replica of a model. One thread uses it. parameters() and buffers() must return the same tensor objects
/// at every call. accelmgr points the parameters' storage at the master's memory (`set_data`), or moves
/// parameters and buffers to a device; a step in which the model replaced a parameter fails with ModelError.
/// Tensors that a model makes by itself belong on the device of its batch.
class Model {
 public:
  virtual ~Model() = default;
  /// Leaf tensors: float64, float32, float16, bfloat16, complex64, complex128, or frozen. Tied weights may be
  /// listed under each name.
  virtual std::vector<NamedTensor> parameters() = 0;
  /// State that forward() changes and that is not a parameter (BatchNorm statistics). May be empty.
  virtual std::vector<NamedTensor> buffers() = 0;
  /// Names of the buffers that are not part of the state dict. Checkpoints keep them for each rank only.
  virtual std::vector<std::string> non_persistent_buffers() const { return {}; }
  /// An exception fails the step. The step is not repeated after an error of torch or a ModelError, because
  /// the same batch would cause it again.
  virtual Outputs forward(const Batch& batch) = 0;
  /// Switches dropout and BatchNorm between training and evaluation.
  virtual void train(bool on) = 0;
};

/// Builds one replica; initial values come from torch's default generator, which the caller has seeded.
using ModelFactory = std::function<std::unique_ptr<Model>(const Config&)>;

/// Throws UsageError when the name is taken. Not thread-safe.
/// Requires: init() was not called yet.
void register_model(const std::string& name, ModelFactory factory);

/// Makes the model that `config.model.kind` names, built-in or registered. Throws ConfigError for an unknown
/// kind (the error names the nearest known one), and ModelError when the factory fails.
std::unique_ptr<Model> make_model(const Config& config);

/// Names of the built-in and the registered models, sorted.
std::vector<std::string> model_kinds();

}  // namespace accelmgr
