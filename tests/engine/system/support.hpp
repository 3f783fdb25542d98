// What tests of whole systems share: copies of the session's tensors, and steps that must succeed.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "elements.hpp"
#include "engine/client/handle.hpp"
#include "engine/replica/replica.hpp"
#include "engine/support/expectations.hpp"
#include "message_of.hpp"

namespace accelmgr::test {

/// Registers a replica before main() begins, because init() needs it. Test files have it as a constant.
struct RegisteredReplica {
  RegisteredReplica(const std::string& kind, replica::Factory factory, replica::Opener opener = nullptr) {
    replica::register_factory(kind, std::move(factory), std::move(opener));
  }
};
struct RegisteredData {
  RegisteredData(const std::string& name, DataFactory factory) { register_data(name, std::move(factory)); }
};

/// Sends SIGKILL, and returns when the process has ended.
void kill_and_wait(pid_t pid);

/// A copy of a tensor, row-major.
struct Tensor {
  std::string name{};
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape{};
  std::vector<std::byte> bytes{};

  bool operator==(const Tensor&) const = default;
  std::size_t count() const { return bytes.size() / size_of(dtype); }
  /// An element of a float32, float64 or int64 tensor.
  double operator[](std::size_t i) const;
};
using Tensors = std::vector<Tensor>;

/// The elements of a tensor of any dtype that can be trained. The tensor outlives them.
Elements elements_of(Tensor& tensor);

/// Copies of the master's tensors, in the order of the manifest.
Tensors parameters_of(const client::Handle& manager);
Tensors gradients_of(const client::Handle& manager);
/// The buffers of the last committed step.
Tensors buffers_of(const client::Handle& manager);
Tensors copies(const std::vector<client::OwnedValue>& values);
/// Views of the tensors, for a checkpoint.
std::vector<client::Value> views(const Tensors& tensors);
/// Writes all parameters, as a host does. Calls `between`, if there is one, before the first write of a
/// tensor and after each.
void write_parameters(client::Handle& manager, const Tensors& values,
                      const std::function<void()>& between = {});

/// True if all tensors have the same bits.
bool same_bits(const Tensors& a, const Tensors& b);
/// The largest distance between tensors at the same place, relative to the norm of the expected one. If that
/// norm is zero, the distance of any other tensor is infinite. If it is zero but for rounding, as the
/// gradient of a bias before a BatchNorm is, the distance is relative to the norm of all tensors.
double distance(const Tensors& actual, const Tensors& expected);

}  // namespace accelmgr::test
