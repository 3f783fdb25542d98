#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

#include "accelmgr/errors.hpp"
#include "accelmgr/model.hpp"
#include "base/did_you_mean.hpp"
#include "base/exception_text.hpp"
#include "libtorch/model/built_in.hpp"
#include "libtorch/tensor/exception_text.hpp"

namespace accelmgr {
namespace {

// A map, so that the names are sorted.
std::map<std::string, ModelFactory>& factories() {
  static std::map<std::string, ModelFactory> all = {{"convnet", model::make_convnet},
                                                    {"gpt", model::make_gpt},
                                                    {"mlp", model::make_mlp},
                                                    {"torchscript", model::make_torchscript}};
  return all;
}

// Programs with models also need readable texts for errors of torch.
const bool knows_torch_errors = (base::know_foreign_exceptions(tensor::text_of_torch_error), true);

// Adds the kind of the model to exceptions of its factory.
std::unique_ptr<Model> build(const std::string& kind, const ModelFactory& factory, const Config& config) {
  auto built =
      base::in_user_code<ModelError>(fmt::format("model '{}'", kind), [&] { return factory(config); });
  if (!built) throw ModelError(fmt::format("model '{}': its factory returned null", kind));
  return built;
}

}  // namespace

const at::Tensor& Batch::operator[](const std::string& name) const {
  std::vector<std::string> names;
  for (const auto& field : fields_) {
    if (field.name == name) return field.tensor;
    names.push_back(field.name);
  }
  throw ModelError(fmt::format("the batch has no field '{}'; it has: {}{}", name, fmt::join(names, ", "),
                               base::did_you_mean(name, names)));
}

void register_model(const std::string& name, ModelFactory factory) {
  if (name.empty()) throw UsageError("register_model: the name of a model must not be empty");
  if (!factory) throw UsageError(fmt::format("register_model: the factory of '{}' is empty", name));
  if (!factories().emplace(name, std::move(factory)).second)
    throw UsageError(fmt::format("register_model: there is already a model '{}'", name));
}

std::unique_ptr<Model> make_model(const Config& config) {
  const auto& kind = config.model.kind;
  const auto found = factories().find(kind);
  if (found == factories().end()) {
    const auto known = model_kinds();
    throw ConfigError(fmt::format("model.kind: there is no model '{}'; known: {}{}", kind,
                                  fmt::join(known, ", "), base::did_you_mean(kind, known)),
                      "model.kind");
  }
  return build(kind, found->second, config);
}

std::vector<std::string> model_kinds() {
  std::vector<std::string> names;
  for (const auto& [name, factory] : factories()) names.push_back(name);
  return names;
}

}  // namespace accelmgr
