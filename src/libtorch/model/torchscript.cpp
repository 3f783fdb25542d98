#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <string_view>

#include "accelmgr/errors.hpp"
#include "base/exception_text.hpp"
#include "libtorch/model/built_in.hpp"
#include "libtorch/tensor/device_failure.hpp"

namespace accelmgr::model {
namespace {

using torch::jit::Module;

/// True if both tensors are the same view of the same storage: one tensor with two names.
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

/// A file stores that tied weights share memory, but not that they are one tensor. After loading, each name
/// has its own tensor, and `set_data` on one would untie it. This class gives all names of one weight the
/// same tensor again.
class Tying {
 public:
  /// `own` lists the tensors of `module` itself. Their names in the whole model begin with `prefix`.
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
            fmt::format("'{}' and '{}' share memory but are different tensors; each must have its own memory "
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
  } catch (...) {
    throw ModelError(
        fmt::format("model.file: '{}' cannot be loaded as TorchScript (torch.jit.save writes it): {}", file,
                    base::current_exception_text()));
  }
}

/// True for the first line of an exception's text: "RuntimeError: ...", "builtins.ValueError: ...".
bool names_exception(std::string_view line) {
  const auto colon = line.find(": ");
  const auto name = line.substr(0, colon);
  return colon != std::string_view::npos && colon > 0 && std::all_of(name.begin(), name.end(), [](char c) {
           return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.';
         });
}

/// Shortens the text of a failed operation in TorchScript to its last line ("RuntimeError: ...") and the
/// innermost frame of the traceback outside torch: a scripted file and its line. The full text looks like
/// this:
///
///   The following operation failed in the TorchScript interpreter.
///   Traceback of TorchScript, serialized code (most recent call last):
///     File "code/__torch__.py", line 9, in forward
///     ...
///   Traceback of TorchScript, original code (most recent call last):
///     File "/home/you/model.py", line 12, in forward
///           return self.layers(x)
///                  ~~~~~~~~~~~ <--- HERE
///     File ".../torch/nn/modules/linear.py", line 134, in forward
///     ...
///   RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x16 and 8x32)
std::string without_interpreter(const std::string& what) {
  constexpr std::string_view traceback = "Traceback of TorchScript", frame = "\n  File \"";
  const auto begin = what.rfind(traceback);
  auto end = what.rfind("<--- HERE\n");  // In the last frame; more lines of its code may follow.
  if (begin == std::string::npos || end == std::string::npos || end < begin) return what;
  do {
    end = what.find('\n', end) + 1;
    if (end == 0 || end == what.size()) return what;
  } while (!names_exception(std::string_view(what).substr(end, what.find('\n', end) - end)));

  std::string users;
  for (auto at = what.find(frame, begin); at < end;) {
    const auto next = std::min(what.find(frame, at + 1), end);
    const auto text = what.substr(at, next - at);
    if (users.empty() || text.substr(0, text.find('\n', 1)).find("/torch/nn/") == std::string::npos)
      users = text;
    at = next;
  }
  auto message = what.substr(end);
  for (const std::string_view prefix : {"builtins.", "RuntimeError: "})
    if (message.starts_with(prefix)) message.erase(0, prefix.size());
  for (auto* text : {&message, &users})
    while (text->ends_with('\n')) text->pop_back();
  return message + users;
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
    // The optimizing executor profiles the first runs and then rewrites the graph. Gradients of later runs
    // would have other bits.
    const torch::jit::GraphOptimizerEnabledGuard as_written(false);
    const auto inputs = arguments(batch);
    return outputs_of(in_script([&] { return module_.forward({}, inputs); }));
  }

 private:
  /// Runs code of the script. Exceptions in it become errors of torch, without the interpreter's additions.
  template <class Body>
  at::IValue in_script(Body&& body) const {
    try {
      return body();
    } catch (const c10::Error& error) {
      tensor::rethrow_device_failure();
      throw c10::Error(without_interpreter(error.what_without_backtrace()));
    } catch (const std::exception& error) {
      tensor::rethrow_device_failure();
      throw c10::Error(without_interpreter(error.what()));
    }
  }

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
        fmt::format("'{}': forward() returned {}, which has no loss; it must return a tensor, a tuple that "
                    "begins with one, or a dict with 'loss'",
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
        if (value.toTensor().is_cpu()) {
          out.scalars.emplace_back(name, value.toTensor().item().toDouble());
        } else {
          out.scalar_tensors.push_back({name, value.toTensor()});
        }
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
