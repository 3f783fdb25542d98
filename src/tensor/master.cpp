#include "tensor/master.hpp"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

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
    throw ModelError(fmt::format(
        "parameter '{}' is {}; the master's are float32 or float64, as mixed precision needs them: "
        "convert the model to float32, and set runners.autocast to bf16 to compute in bfloat16",
        p.name, at::toString(p.tensor.scalar_type())));
}

session::Group group_of(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return session::Group::frozen;
  return tensor.dim() < 2 ? session::Group::no_decay : session::Group::decay;
}

/// The bytes between its first and its last element; empty without elements.
std::pair<const std::byte*, const std::byte*> range_of(const at::Tensor& tensor) {
  const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {begin, begin};
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + static_cast<std::size_t>(last + 1) * tensor.element_size()};
}

/// Where the values of a parameter begin in the master.
std::byte* values_of(const session::Session& session, const session::Manifest& manifest, std::size_t index) {
  const auto& entry = manifest.tensors[index];
  const auto first =
      entry.shares < 0 ? entry.first
                       : manifest.tensors[static_cast<std::size_t>(entry.shares)].first + entry.shared_offset;
  return session.parameters() + first * session::bytes_of(session.header().element);
}

/// Finds out which parameters lie over the memory of another one.
void find_shared(ModelTensors& model) {
  struct Range {
    const std::byte* begin;
    const std::byte* end;
    std::size_t index;
  };
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    const auto [begin, end] = range_of(model.parameters[i].tensor);
    if (begin != end) ranges.push_back({begin, end, i});
  }
  const auto tensor = [&](const Range& range) { return model.parameters[range.index].tensor; };
  // One within which others lie comes before them.
  std::sort(ranges.begin(), ranges.end(), [&](const Range& a, const Range& b) {
    const auto rank = [&](const Range& r) {
      return std::tuple(r.begin, -(r.end - r.begin), !tensor(r).is_contiguous(), r.index);
    };
    return rank(a) < rank(b);
  });
  const Range* owner = nullptr;
  for (const auto& range : ranges) {
    if (owner == nullptr || range.begin >= owner->end) {
      owner = &range;
      continue;
    }
    if (range.end > owner->end || !tensor(*owner).is_contiguous())
      throw ModelError(
          fmt::format("parameters '{}' and '{}' overlap in memory, and neither lies within the other as a "
                      "whole; give each its own memory (clone())",
                      model.parameters[owner->index].name, model.parameters[range.index].name));
    auto& entry = model.manifest.tensors[range.index];
    entry.shares = static_cast<std::int64_t>(owner->index);
    entry.shared_offset =
        static_cast<std::uint64_t>(range.begin - owner->begin) / tensor(range).element_size();
    entry.strides = tensor(range).strides().vec();
  }
}

}  // namespace

ModelTensors describe(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
                      const std::vector<std::string>& non_persistent) {
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
      throw ModelError(fmt::format(
          "parameter '{}' is {}, but '{}' is {}; all must have one dtype: convert the model to one of them",
          p.name, at::toString(p.tensor.scalar_type()), parameters.front().name,
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
  find_shared(out);
  seen.clear();
  for (const auto& b : buffers) {
    if (!b.tensor.defined()) continue;
    const auto [at, is_new] = seen.emplace(b.tensor.unsafeGetTensorImpl(), out.buffers.size());
    const bool persistent =
        std::find(non_persistent.begin(), non_persistent.end(), b.name) == non_persistent.end();
    if (!is_new) {
      if (persistent) out.manifest.buffers[at->second].aliases.push_back(b.name);
      continue;
    }
    out.buffers.push_back(b);
    out.manifest.buffers.push_back(
        {.name = b.name,
         .aliases = {},
         .shape = b.tensor.sizes().vec(),
         .dtype = static_cast<std::int32_t>(b.tensor.scalar_type()),
         .offset = 0,
         .bytes = static_cast<std::uint64_t>(b.tensor.numel()) * b.tensor.element_size(),
         .persistent = persistent});
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

at::Tensor parameter_view(const session::Session& session, const session::Manifest& manifest,
                          std::size_t index) {
  const auto& entry = manifest.tensors[index];
  const auto element = session.header().element;
  if (entry.shares < 0) return master_view(session.parameters(), element, entry);
  return at::from_blob(values_of(session, manifest, index), entry.shape, entry.strides,
                       at::TensorOptions().dtype(scalar_type(element)));
}

void gather_shared_parameters(const session::Session& session, const session::Manifest& manifest) {
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i)
    if (manifest.tensors[i].shares >= 0)
      master_view(session.parameters(), session.header().element, manifest.tensors[i])
          .copy_(parameter_view(session, manifest, i));
}

void scatter_shared_parameters(const session::Session& session, const session::Manifest& manifest) {
  for (std::size_t i = 0; i < manifest.tensors.size(); ++i)
    if (manifest.tensors[i].shares >= 0)
      parameter_view(session, manifest, i)
          .copy_(master_view(session.parameters(), session.header().element, manifest.tensors[i]));
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
    parameter.set_data(parameter_view(session, manifest, i));
  }
}

void check_aliases(const ModelTensors& model, const std::vector<NamedTensor>& current,
                   const session::Session& session, const session::Manifest& manifest) {
  const auto refuse = [](const std::string& name, const char* what) {
    throw ModelError(
        fmt::format("parameter '{}' {}: gradients of what stands in its place reach nobody. Change "
                    "parameters in place, or "
                    "make what forward() assigns no parameter",
                    name, what));
  };
  std::size_t next = 0;
  for (const auto& [name, tensor] : current) {
    if (next == model.parameters.size() || name != model.parameters[next].name) continue;  // An alias.
    if (!tensor.is_same(model.parameters[next].tensor)) refuse(name, "was replaced by the model");
    ++next;
  }
  if (next < model.parameters.size()) refuse(model.parameters[next].name, "is gone from the model");
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    const auto& [name, tensor] = model.parameters[i];
    if (manifest.tensors[i].count == 0) continue;  // It has no address.
    if (tensor.const_data_ptr() != values_of(session, manifest, i))
      refuse(name, "was replaced: it no longer lies in the master's memory (load() or set_data()?)");
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
