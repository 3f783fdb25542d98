#include "engine/support/network.hpp"

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "elements.hpp"
#include "engine/session/strided.hpp"

namespace accelmgr::test {
namespace {

Variable zeros(const std::string& name, DType dtype, std::vector<std::int64_t> shape) {
  Variable variable{.name = name, .dtype = dtype, .shape = std::move(shape)};
  variable.strides = session::dense_strides(variable.shape);
  variable.own.resize(variable.elements() * size_of(dtype));
  variable.values = variable.own.data();
  return variable;
}

void describe(const Variable& variable, std::vector<replica::Tensor>& tensors) {
  auto names = variable.aliases;
  names.insert(names.begin(), variable.name);
  for (const auto& name : names)
    tensors.push_back({.name = name,
                       .dtype = variable.dtype,
                       .shape = variable.shape,
                       .strides = variable.strides,
                       .data = variable.values,
                       .identity = reinterpret_cast<std::uintptr_t>(&variable),
                       .requires_grad = variable.requires_grad});
}

}  // namespace

std::size_t Variable::elements() const {
  std::size_t count = 1;
  for (const auto size : shape) count *= static_cast<std::size_t>(size);
  return count;
}

void Variable::bind_values(const replica::Place& place) {
  values = place.data;
  strides = place.strides;
  own = {};
}

void Variable::sum_gradient(std::byte* sum, bool add) const {
  with_type(session::element_of(dtype).value(), [&](auto stored) {
    const auto* from = reinterpret_cast<const decltype(stored)*>(gradient.data());
    auto* to = reinterpret_cast<decltype(stored)*>(sum);
    for (std::size_t i = 0; i < gradient.size() / sizeof stored; ++i)
      to[i] = add ? narrow<decltype(stored)>(widen(to[i]) + widen(from[i])) : from[i];
  });
}

replica::Description Network::description() {
  replica::Description description;
  for (const auto& parameter : parameters_) describe(parameter, description.parameters);
  for (const auto& buffer : buffers_) describe(buffer, description.buffers);
  return description;
}

Variable& Network::add_parameter(const std::string& name, DType dtype, std::vector<std::int64_t> shape) {
  parameters_.push_back(zeros(name, dtype, std::move(shape)));
  parameters_.back().gradient.resize(parameters_.back().own.size());
  return parameters_.back();
}

Variable& Network::add_buffer(const std::string& name, DType dtype, std::vector<std::int64_t> shape) {
  return buffers_.emplace_back(zeros(name, dtype, std::move(shape)));
}

const replica::Field& field_of(std::span<const replica::Field> batch, const std::string& name) {
  const auto found = std::ranges::find(batch, name, &replica::Field::name);
  if (found == batch.end()) throw ModelError("the batch has no field '" + name + "'");
  return *found;
}

}  // namespace accelmgr::test
