#include "engine/replica/model.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "accelmgr/errors.hpp"
#include "engine/session/strided.hpp"

namespace accelmgr::replica {
namespace {

std::uint64_t count_of(std::span<const std::int64_t> shape) {
  std::uint64_t count = 1;
  for (const auto size : shape) count *= static_cast<std::uint64_t>(size);
  return count;
}
std::uint64_t count_of(const Tensor& tensor) { return count_of(tensor.shape); }

bool is_row_major(const Tensor& tensor) {
  std::int64_t expected = 1;
  for (std::size_t d = tensor.shape.size(); d-- > 0;) {
    if (tensor.shape[d] != 1 && tensor.strides[d] != expected) return false;
    expected *= tensor.shape[d];
  }
  return true;
}

bool is_compact(const Tensor& tensor) { return session::is_compact(tensor.shape, tensor.strides); }

/// The bytes from the first to the last element; an empty range for a tensor without elements.
std::pair<const std::byte*, const std::byte*> range_of(const Tensor& tensor) {
  if (count_of(tensor) == 0) return {tensor.data, tensor.data};
  std::int64_t last = 0;
  for (std::size_t d = 0; d < tensor.shape.size(); ++d) last += (tensor.shape[d] - 1) * tensor.strides[d];
  return {tensor.data, tensor.data + static_cast<std::size_t>(last + 1) * size_of(tensor.dtype)};
}

std::string text_of(DType dtype, std::span<const std::int64_t> shape) {
  return fmt::format("{} [{}]", name_of(dtype), fmt::join(shape, ", "));
}

/// In the session a parameter keeps the order of its elements in memory, but no gaps. A frozen parameter that
/// is expanded stays expanded.
std::vector<std::int64_t> strides_of(const Tensor& parameter) {
  const auto stored =
      parameter.requires_grad ? parameter.shape : session::stored_shape(parameter.shape, parameter.strides);
  return session::is_compact(stored, parameter.strides) ? parameter.strides
                                                        : session::dense_strides(parameter.shape);
}

session::Group group_of(const Tensor& parameter) {
  if (!parameter.requires_grad) return session::Group::frozen;
  return parameter.shape.size() < 2 ? session::Group::no_decay : session::Group::decay;
}

void check_form(const char* what, const Tensor& tensor) {
  if (tensor.name.empty()) throw ModelError(fmt::format("a {} of the model has no name", what));
  if (static_cast<std::size_t>(tensor.dtype) >= dtype_count)
    throw ModelError(fmt::format("{} '{}' has the dtype number {}, which is not a dtype", what, tensor.name,
                                 static_cast<int>(tensor.dtype)));
  if (tensor.strides.size() != tensor.shape.size())
    throw ModelError(fmt::format("{} '{}' has {} dimensions and {} strides", what, tensor.name,
                                 tensor.shape.size(), tensor.strides.size()));
  for (const auto size : tensor.shape)
    if (size < 0)
      throw ModelError(fmt::format("{} '{}' has the shape [{}]; sizes must be 0 or more", what, tensor.name,
                                   fmt::join(tensor.shape, ", ")));
  if (tensor.data == nullptr && count_of(tensor) > 0)
    throw ModelError(fmt::format("{} '{}' has no memory", what, tensor.name));
}

void check_parameter(const Tensor& parameter) {
  if (parameter.requires_grad && !session::element_of(parameter.dtype))
    throw ModelError(
        fmt::format("parameter '{}' is {} and requires a gradient; only float64, float32, float16, bfloat16, "
                    "complex64 and complex128 can be trained: freeze it, or convert it",
                    parameter.name, name_of(parameter.dtype)));
}

/// Finds the parameters that lie within the memory of another one.
void find_shared(ModelTensors& model) {
  struct Range {
    const std::byte* begin;
    const std::byte* end;
    std::size_t index;
  };
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    const auto [begin, end] = range_of(model.parameters[i]);
    if (begin != end) ranges.push_back({begin, end, i});
  }
  // A parameter that contains others comes before them.
  std::sort(ranges.begin(), ranges.end(), [&](const Range& a, const Range& b) {
    const auto rank = [&](const Range& r) {
      return std::tuple(r.begin, -(r.end - r.begin), !is_row_major(model.parameters[r.index]), r.index);
    };
    return rank(a) < rank(b);
  });
  const Range* owner = nullptr;
  for (const auto& range : ranges) {
    if (owner == nullptr || range.begin >= owner->end) {
      owner = &range;
      continue;
    }
    const auto& tensor = model.parameters[range.index];
    if (range.end > owner->end || !is_compact(model.parameters[owner->index]) ||
        tensor.dtype != model.parameters[owner->index].dtype)
      throw ModelError(
          fmt::format("parameters '{}' and '{}' overlap in memory, and neither lies within the other as a "
                      "whole and with one dtype; give each its own memory (clone())",
                      model.parameters[owner->index].name, tensor.name));
    auto& entry = model.manifest.tensors[range.index];
    entry.shares = static_cast<std::int64_t>(owner->index);
    entry.shared_offset = static_cast<std::uint64_t>(range.begin - owner->begin) / size_of(tensor.dtype);
    entry.strides = tensor.strides;
    entry.count = count_of(tensor);
  }
}

/// Refuses two different tensors with one name.
class Names {
 public:
  void add(const char* what, const Tensor& tensor) {
    const auto [known, is_new] = owners_.emplace(tensor.name, tensor.identity);
    if (!is_new && known->second != tensor.identity)
      throw ModelError(fmt::format("two {}s of the model are called '{}'", what, tensor.name));
  }

 private:
  std::map<std::string, std::uintptr_t> owners_;
};

/// In the session, a buffer is row-major without gaps.
void copy_to(std::byte* to, const Tensor& from) {
  session::copy_strided(to, session::dense_strides(from.shape), from.data, from.strides, from.shape,
                        size_of(from.dtype));
}

void copy_from(const Tensor& to, const std::byte* from) {
  session::copy_strided(to.data, to.strides, from, session::dense_strides(to.shape), to.shape,
                        size_of(to.dtype));
}

}  // namespace

ModelTensors tensors_of(const Description& description) {
  if (description.parameters.empty()) throw ModelError("the model has no parameters");
  ModelTensors out;
  out.has_values = description.has_values;
  std::map<std::uintptr_t, std::size_t> seen;
  Names parameter_names, buffer_names;
  for (const auto& parameter : description.parameters) {
    check_form("parameter", parameter);
    check_parameter(parameter);
    parameter_names.add("parameter", parameter);
    const auto [at, is_new] = seen.emplace(parameter.identity, out.parameters.size());
    if (!is_new) {
      out.manifest.tensors[at->second].aliases.push_back(parameter.name);
      continue;
    }
    const auto strides = strides_of(parameter);
    out.parameters.push_back(parameter);
    out.manifest.tensors.push_back({.name = parameter.name,
                                    .aliases = {},
                                    .shape = parameter.shape,
                                    .dtype = parameter.dtype,
                                    .runner_dtype = parameter.dtype,
                                    .rounds = parameter.rounds,
                                    .count = count_of(session::stored_shape(parameter.shape, strides)),
                                    .group = group_of(parameter),
                                    .strides = strides,
                                    .persistent = parameter.persistent});
  }
  out.manifest.set_precision({});
  find_shared(out);
  seen.clear();
  for (const auto& buffer : description.buffers) {
    check_form("buffer", buffer);
    buffer_names.add("buffer", buffer);
    const auto [at, is_new] = seen.emplace(buffer.identity, out.buffers.size());
    if (!is_new) {
      if (buffer.persistent) out.manifest.buffers[at->second].aliases.push_back(buffer.name);
      continue;
    }
    out.buffers.push_back(buffer);
    out.manifest.buffers.push_back({.name = buffer.name,
                                    .aliases = {},
                                    .shape = buffer.shape,
                                    .dtype = buffer.dtype,
                                    .offset = 0,
                                    .bytes = count_of(buffer) * size_of(buffer.dtype),
                                    .persistent = buffer.persistent,
                                    .of_model = buffer.of_model});
  }
  return out;
}

void check_same(const ModelTensors& model, const session::Manifest& manifest) {
  constexpr const char* why = "its factory is not deterministic";
  if (model.parameters.size() != manifest.tensors.size())
    throw ModelError(fmt::format("the model built here has {} parameters, but the master has {}: {}",
                                 model.parameters.size(), manifest.tensors.size(), why));
  if (model.buffers.size() != manifest.buffers.size())
    throw ModelError(fmt::format("the model built here has {} buffers, but the master has {}: {}",
                                 model.buffers.size(), manifest.buffers.size(), why));
  const auto check = [&](const char* what, std::size_t i, const Tensor& here, const std::string& name,
                         DType dtype, const std::vector<std::int64_t>& shape) {
    if (here.name == name && here.dtype == dtype && here.shape == shape) return;
    throw ModelError(fmt::format("{} {} is '{}' {} here, but '{}' {} in the master: {}", what, i, here.name,
                                 text_of(here.dtype, here.shape), name, text_of(dtype, shape), why));
  };
  for (std::size_t i = 0; i < model.parameters.size(); ++i)
    check("parameter", i, model.parameters[i], manifest.tensors[i].name, manifest.tensors[i].dtype,
          manifest.tensors[i].shape);
  for (std::size_t i = 0; i < model.buffers.size(); ++i)
    check("buffer", i, model.buffers[i], manifest.buffers[i].name, manifest.buffers[i].dtype,
          manifest.buffers[i].shape);
}

std::vector<Place> places_of(std::byte* parameters, const session::Manifest& manifest) {
  std::vector<Place> places;
  for (const auto& entry : manifest.tensors)
    places.push_back({parameters + manifest.values_of(entry), entry.value_strides()});
  return places;
}

void store_initial(const ModelTensors& model, session::Session& session, const session::Manifest& manifest) {
  const auto places = places_of(session.parameters(), manifest);
  for (std::size_t i = 0; model.has_values && i < model.parameters.size(); ++i) {
    const auto& parameter = model.parameters[i];
    session::copy_strided(places[i].data, places[i].strides, parameter.data, parameter.strides,
                          parameter.shape, size_of(parameter.dtype));
  }
  for (int rank = 0; rank < session.ranks(); ++rank)
    store_buffers(model.buffers, manifest, session.buffers(0, rank));
  store_buffers(model.buffers, manifest, session.result_buffers(0));
}

void store_buffers(const std::vector<Tensor>& buffers, const session::Manifest& manifest, std::byte* copy) {
  for (std::size_t i = 0; i < buffers.size(); ++i) copy_to(copy + manifest.buffers[i].offset, buffers[i]);
}

void load_buffers(const std::vector<Tensor>& buffers, const session::Manifest& manifest,
                  const std::byte* copy) {
  for (std::size_t i = 0; i < buffers.size(); ++i) copy_from(buffers[i], copy + manifest.buffers[i].offset);
}

}  // namespace accelmgr::replica
