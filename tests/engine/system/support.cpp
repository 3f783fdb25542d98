#include "support.hpp"

#include <signal.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/ipc/process.hpp"
#include "engine/replica/model.hpp"
#include "engine/session/strided.hpp"

namespace accelmgr::test {
namespace {

std::vector<replica::Place> places_in(const client::Handle& manager) {
  return replica::places_of(manager.view().parameters(), manager.manifest());
}

/// A tensor without bytes for each parameter.
Tensors forms_of(const client::Handle& manager) {
  Tensors out;
  for (const auto& entry : manager.manifest().tensors)
    out.push_back({entry.name, entry.dtype, entry.shape, {}});
  return out;
}

std::size_t bytes_of(const client::Value& value) {
  auto bytes = size_of(value.dtype);
  for (const auto size : value.shape) bytes *= static_cast<std::size_t>(size);
  return bytes;
}

Tensor copy_of(const client::Value& value) {
  return {value.name, value.dtype, value.shape, {value.data, value.data + bytes_of(value)}};
}

}  // namespace

void kill_and_wait(pid_t pid) {
  const auto pidfd = ipc::open_pidfd(pid);
  ipc::send_signal(pidfd.get(), SIGKILL);
  EXPECT_TRUE(ipc::wait_ended(pidfd.get(), soon()));
}

double Tensor::operator[](std::size_t i) const {
  const auto* data = bytes.data();
  switch (dtype) {
    case DType::float64:
      return reinterpret_cast<const double*>(data)[i];
    case DType::int64:
      return double(reinterpret_cast<const std::int64_t*>(data)[i]);
    default:
      return reinterpret_cast<const float*>(data)[i];
  }
}

Elements elements_of(Tensor& tensor) {
  return {tensor.bytes.data(), session::element_of(tensor.dtype).value(),
          tensor.count() * session::elements_in(tensor.dtype)};
}

Tensors parameters_of(const client::Handle& manager) {
  auto out = forms_of(manager);
  const auto places = places_in(manager);
  for (std::size_t i = 0; i < out.size(); ++i) {
    auto& tensor = out[i];
    tensor.bytes.resize(manager.manifest().tensors[i].count * size_of(tensor.dtype));
    session::copy_strided(tensor.bytes.data(), session::dense_strides(tensor.shape), places[i].data,
                          places[i].strides, tensor.shape, size_of(tensor.dtype));
  }
  return out;
}

Tensors gradients_of(const client::Handle& manager) {
  auto out = forms_of(manager);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto& entry = manager.manifest().tensors[i];
    out[i].dtype = entry.gradient_dtype();
    out[i].bytes.resize(entry.gradient_bytes());  // Zeros for a parameter that is frozen.
    if (session::has_gradient(*manager.session(), manager.manifest(), i))
      std::memcpy(out[i].bytes.data(), manager.session()->gradients() + entry.gradient, out[i].bytes.size());
  }
  return out;
}

Tensors buffers_of(const client::Handle& manager) {
  Tensors out;
  for (const auto& buffer : manager.buffers()) out.push_back(copy_of(buffer));
  return out;
}

Tensors copies(const std::vector<client::OwnedValue>& values) {
  Tensors out;
  for (const auto& [name, dtype, shape, data] : values)
    out.push_back(copy_of({name, dtype, shape, data.get()}));
  return out;
}

std::vector<client::Value> views(const Tensors& tensors) {
  std::vector<client::Value> out;
  for (const auto& tensor : tensors)
    out.push_back({tensor.name, tensor.dtype, tensor.shape, tensor.bytes.data()});
  return out;
}

void write_parameters(client::Handle& manager, const Tensors& values, const std::function<void()>& between) {
  const auto places = places_in(manager);
  manager.begin_writing();
  if (between) between();
  for (std::size_t i = 0; i < values.size(); ++i) {
    session::copy_strided(places.at(i).data, places[i].strides, values[i].bytes.data(),
                          session::dense_strides(values[i].shape), values[i].shape, size_of(values[i].dtype));
    if (between) between();
  }
  manager.end_writing();
}

bool same_bits(const Tensors& a, const Tensors& b) { return a == b; }

double distance(const Tensors& actual, const Tensors& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  const auto norm_of = [](const Tensor& tensor) {
    double norm = 0;
    for (std::size_t i = 0; i < tensor.count(); ++i) norm = std::hypot(norm, tensor[i]);
    return norm;
  };
  double norm_of_all = 0;
  for (const auto& tensor : expected) norm_of_all = std::hypot(norm_of_all, norm_of(tensor));
  double farthest = 0;
  for (std::size_t t = 0; t < std::min(actual.size(), expected.size()); ++t) {
    EXPECT_EQ(actual[t].shape, expected[t].shape);
    double apart = 0;
    for (std::size_t i = 0; i < std::min(actual[t].count(), expected[t].count()); ++i)
      apart = std::hypot(apart, actual[t][i] - expected[t][i]);
    if (apart == 0) continue;
    const double norm = norm_of(expected[t]);
    if (!std::isfinite(apart) || norm == 0) return std::numeric_limits<double>::infinity();
    farthest = std::max(farthest, apart / (norm < 1e-6 * norm_of_all ? norm_of_all : norm));
  }
  return farthest;
}

}  // namespace accelmgr::test
