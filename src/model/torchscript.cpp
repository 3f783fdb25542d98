#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <filesystem>

#include "accelmgr/errors.hpp"
#include "model/built_in.hpp"

namespace accelmgr::model {
namespace {

using torch::jit::Module;

/// Where a tensor lies: two that agree in all of it are one tensor with two names.
bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type();
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.storage().unsafeGetStorageImpl() != b.storage().unsafeGetStorageImpl() || a.numel() == 0 ||
      b.numel() == 0)
    return false;
  const auto end = [](const at::Tensor& t) {
    auto last = t.storage_offset();
    for (std::int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    return (last + 1) * static_cast<std::int64_t>(t.itemsize());
  };
  const auto begin = [](const at::Tensor& t) {
    return t.storage_offset() * static_cast<std::int64_t>(t.itemsize());
  };
  return begin(a) < end(b) && begin(b) < end(a);
}

/// A file keeps the storage that tied weights share, not that they are one tensor: loaded, each name has a
/// tensor of its own, and `set_data` on one would untie it. Gives all names of one storage the same tensor
/// again.
class Tying {
 public:
  /// `own(name)`: the tensors of `module` itself; their names in the whole model begin with `prefix`.
  template <class Slots>
  void tie(Module module, const std::string& prefix, const Slots& own) {
    for (const auto& slot : own) {
      const auto name = prefix.empty() ? slot.name : prefix + "." + slot.name;
      if (const auto* first = find(slot.value, name)) {
        module.setattr(slot.name, first->tensor);
      } else {
        known_.push_back({name, slot.value});
      }
    }
  }

 private:
  const NamedTensor* find(const at::Tensor& tensor, const std::string& name) const {
    for (const auto& other : known_) {
      if (same_memory(other.tensor, tensor)) return &other;
      if (overlap(other.tensor, tensor)) {
        throw ModelError(
            fmt::format("'{}' and '{}' share memory without being one tensor; each must be stored by itself "
                        "(clone() one of them before saving)",
                        other.name, name));
      }
    }
    return nullptr;
  }

  std::vector<NamedTensor> known_;
};

void tie_shared_tensors(const Module& root) {
  Tying parameters, buffers;
  for (const auto& module : root.named_modules()) {
    parameters.tie(module.value, module.name, module.value.named_parameters(/*recurse=*/false));
    buffers.tie(module.value, module.name, module.value.named_buffers(/*recurse=*/false));
  }
}

template <class Slots>
std::vector<NamedTensor> listed(const Slots& slots) {
  std::vector<NamedTensor> out;
  for (const auto& slot : slots) out.push_back({slot.name, slot.value});
  return out;
}

Module load(const std::string& file) {
  if (!std::filesystem::is_regular_file(file))
    throw ModelError(fmt::format("model.file: there is no file '{}'", file));
  try {
    return torch::jit::load(file, at::Device(at::kCPU));
  } catch (const c10::Error& error) {
    throw ModelError(
        fmt::format("model.file: '{}' is no TorchScript that can be loaded (torch.jit.save writes it): {}",
                    file, error.what_without_backtrace()));
  } catch (const std::exception& error) {
    throw ModelError(
        fmt::format("model.file: '{}' is no TorchScript that can be loaded (torch.jit.save writes it): {}",
                    file, error.what()));
  }
}

std::string type_name(const at::IValue& value) { return value.type()->repr_str(); }

class TorchScript final : public Model {
 public:
  explicit TorchScript(const std::string& file) : file_(file), module_(load(file)) {
    if (!module_.find_method("forward"))
      throw ModelError(fmt::format("'{}': the module has no method forward()", file_));
    tie_shared_tensors(module_);
    parameters_ = listed(module_.named_parameters());
    buffers_ = listed(module_.named_buffers());
  }

  std::vector<NamedTensor> parameters() override { return parameters_; }
  std::vector<NamedTensor> buffers() override { return buffers_; }
  void train(bool on) override { module_.train(on); }

  Outputs forward(const Batch& batch) override {
    // Its optimizing executor profiles the first runs and rewrites the graph for later ones, whose gradients
    // have other bits.
    const torch::jit::GraphOptimizerEnabledGuard as_written(false);
    return outputs_of(module_.forward({}, arguments(batch)));
  }

 private:
  torch::jit::Kwargs arguments(const Batch& batch) const {
    const auto& takes = module_.get_method("forward").function().getSchema().arguments();
    torch::jit::Kwargs out;
    for (const auto& field : batch.fields()) out.emplace(field.name, field.tensor);
    std::size_t used = 0;
    bool all_given = true;
    for (std::size_t i = 1; i < takes.size(); ++i) {  // 0 is self.
      const bool given = out.contains(takes[i].name());
      used += given;
      all_given = all_given && (given || takes[i].default_value().has_value());
    }
    if (!all_given || used != out.size()) throw ModelError(mismatch(batch, takes));
    return out;
  }

  std::string mismatch(const Batch& batch, const std::vector<c10::Argument>& takes) const {
    std::vector<std::string> wanted, given;
    for (std::size_t i = 1; i < takes.size(); ++i) wanted.push_back(takes[i].name());
    for (const auto& field : batch.fields()) given.push_back(field.name);
    return fmt::format(
        "'{}': forward() takes ({}), but the batch has the fields ({}); they are passed by name", file_,
        fmt::join(wanted, ", "), fmt::join(given, ", "));
  }

  Outputs outputs_of(const at::IValue& value) const {
    if (value.isTensor()) return {value.toTensor(), {}};
    if (value.isTuple() && !value.toTupleRef().elements().empty() &&
        value.toTupleRef().elements()[0].isTensor())
      return {value.toTupleRef().elements()[0].toTensor(), {}};
    if (value.isGenericDict()) return from_dict(value.toGenericDict());
    throw ModelError(
        fmt::format("'{}': forward() returned {}, in which there is no loss: a tensor, a tuple that begins "
                    "with it, or a dict with 'loss'",
                    file_, type_name(value)));
  }

  Outputs from_dict(const c10::Dict<at::IValue, at::IValue>& dict) const {
    Outputs out;
    std::vector<std::string> keys;
    for (const auto& item : dict) {
      if (!item.key().isString()) continue;
      const auto& name = keys.emplace_back(item.key().toStringRef());
      const at::IValue value = item.value();
      if (name == "loss" && value.isTensor()) {
        out.loss = value.toTensor();
      } else if (value.isTensor() && value.toTensor().dim() == 0) {
        out.scalars.emplace_back(name, value.toTensor().item().toDouble());
      } else if (value.isDouble() || value.isInt()) {
        out.scalars.emplace_back(name, value.toScalar().toDouble());
      }
    }
    if (!out.loss.defined())
      throw ModelError(fmt::format("'{}': forward() returned a dict without a tensor 'loss'; its keys: {}",
                                   file_, fmt::join(keys, ", ")));
    return out;
  }

  std::string file_;
  Module module_;
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> buffers_;
};

}  // namespace

std::unique_ptr<Model> make_torchscript(const Config& config) {
  return std::make_unique<TorchScript>(config.model.file);
}

}  // namespace accelmgr::model
