#include "tensor/master.hpp"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <map>

#include "accelmgr/errors.hpp"

namespace accelmgr::tensor {
namespace {

at::ScalarType scalar_type(session::Element element) {
  return element == session::Element::f32 ? at::kFloat : at::kDouble;
}

std::string shape_text(at::IntArrayRef shape) {
  return fmt::format("[{}]", fmt::join(shape.begin(), shape.end(), ", "));
}

void check_parameter(const NamedTensor& p) {
  if (!p.tensor.defined()) throw ModelError(fmt::format("parameter '{}' is undefined", p.name));
  if (!p.tensor.device().is_cpu())
    throw ModelError(
        fmt::format("parameter '{}' is on {}; runners need it on the CPU", p.name, p.tensor.device().str()));
  if (p.tensor.layout() != at::kStrided)
    throw ModelError(fmt::format("parameter '{}' is sparse; parameters must be dense", p.name));
  if (!p.tensor.is_leaf())
    throw ModelError(
        fmt::format("parameter '{}' is computed from others; parameters must be leaves", p.name));
  if (p.tensor.scalar_type() != at::kFloat && p.tensor.scalar_type() != at::kDouble)
    throw ModelError(fmt::format("parameter '{}' is {}; parameters must be float32 or float64", p.name,
                                 at::toString(p.tensor.scalar_type())));
}

session::Group group_of(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return session::Group::frozen;
  return tensor.dim() < 2 ? session::Group::no_decay : session::Group::decay;
}

}  // namespace

ModelTensors describe(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers) {
  if (parameters.empty()) throw ModelError("the model has no parameters");
  ModelTensors out;
  std::map<const void*, std::size_t> seen;
  for (const auto& p : parameters) {
    check_parameter(p);
    const auto [at, is_new] = seen.emplace(p.tensor.unsafeGetTensorImpl(), out.parameters.size());
    if (!is_new) {
      out.manifest.tensors[at->second].aliases.push_back(p.name);
      continue;
    }
    if (p.tensor.scalar_type() != parameters.front().tensor.scalar_type())
      throw ModelError(fmt::format("parameter '{}' is {}, but '{}' is {}; all must have one dtype", p.name,
                                   at::toString(p.tensor.scalar_type()), parameters.front().name,
                                   at::toString(parameters.front().tensor.scalar_type())));
    out.parameters.push_back(p);
    out.manifest.tensors.push_back({.name = p.name,
                                    .aliases = {},
                                    .shape = p.tensor.sizes().vec(),
                                    .first = 0,
                                    .count = static_cast<std::uint64_t>(p.tensor.numel()),
                                    .group = group_of(p.tensor)});
  }
  out.element =
      parameters.front().tensor.scalar_type() == at::kFloat ? session::Element::f32 : session::Element::f64;
  for (const auto& b : buffers) {
    if (!b.tensor.defined() || !seen.emplace(b.tensor.unsafeGetTensorImpl(), 0).second) continue;
    out.buffers.push_back(b);
    out.manifest.buffers.push_back({.name = b.name,
                                    .shape = b.tensor.sizes().vec(),
                                    .dtype = static_cast<std::int32_t>(b.tensor.scalar_type()),
                                    .offset = 0,
                                    .bytes = b.tensor.nbytes()});
  }
  return out;
}

at::Tensor flat_view(std::byte* memory, session::Element element, std::uint64_t first, std::uint64_t count) {
  return at::from_blob(memory + first * session::bytes_of(element), {static_cast<std::int64_t>(count)},
                       at::TensorOptions().dtype(scalar_type(element)));
}

at::Tensor master_view(std::byte* memory, session::Element element, const session::TensorEntry& entry) {
  return at::from_blob(memory + entry.first * session::bytes_of(element), entry.shape,
                       at::TensorOptions().dtype(scalar_type(element)));
}

at::Tensor buffer_view(std::byte* copy, const session::BufferEntry& entry) {
  return at::from_blob(copy + entry.offset, entry.shape,
                       at::TensorOptions().dtype(static_cast<at::ScalarType>(entry.dtype)));
}

void bind_parameters(const ModelTensors& model, const session::Session& session,
                     const session::Manifest& manifest) {
  if (model.parameters.size() != manifest.tensors.size() || model.element != session.header().element)
    throw ModelError(
        fmt::format("the model built here has {} parameters, the master {}: its factory is not deterministic",
                    model.parameters.size(), manifest.tensors.size()));
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    const auto& entry = manifest.tensors[i];
    const auto& [name, parameter] = model.parameters[i];
    if (name != entry.name || parameter.sizes().vec() != entry.shape)
      throw ModelError(fmt::format(
          "parameter {} is '{}' {} here and '{}' {} in the master: the model's factory is not deterministic",
          i, name, shape_text(parameter.sizes()), entry.name, shape_text(entry.shape)));
    parameter.set_data(master_view(session.parameters(), model.element, entry));
  }
}

void check_aliases(const ModelTensors& model, const session::Session& session,
                   const session::Manifest& manifest) {
  const auto bytes = session::bytes_of(model.element);
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    if (model.parameters[i].tensor.const_data_ptr() !=
        session.parameters() + manifest.tensors[i].first * bytes)
      throw ModelError(
          fmt::format("parameter '{}' no longer lies in the master's memory: the model replaced it (by "
                      "load() or set_data?)",
                      model.parameters[i].name));
  }
}

void store_buffers(const ModelTensors& model, const session::Manifest& manifest, std::byte* copy) {
  for (std::size_t i = 0; i < model.buffers.size(); ++i)
    buffer_view(copy, manifest.buffers[i]).copy_(model.buffers[i].tensor);
}

void load_buffers(const ModelTensors& model, const session::Manifest& manifest, const std::byte* copy) {
  for (std::size_t i = 0; i < model.buffers.size(); ++i)
    model.buffers[i].tensor.copy_(buffer_view(const_cast<std::byte*>(copy), manifest.buffers[i]));
}

}  // namespace accelmgr::tensor
