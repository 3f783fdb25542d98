// What a runner is to its replica, as Python meets it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/cuda/error.hpp"
#include "engine/replica/replica.hpp"

namespace accelmgr::python {

/// The hooks of Python call it. Its exceptions pass through autograd as exceptions of Python;
/// PythonReplica::called() throws the original again.
struct RunnerSide {
  std::optional<replica::Binding> binding{};  ///< Set by Replica::bind().
  std::vector<replica::Place> places{};       ///< The array of the binding.
  std::exception_ptr thrown{};
  std::string loss_weight{};  ///< The number that each output must have (`loss_scaling: sum_over`), or empty.

  template <class Call>
  auto call(Call&& body) {
    try {
      return body(*binding);
    } catch (const device::DeviceError&) {
      throw;  // The replica of Python decides what it means.
    } catch (...) {
      thrown = std::current_exception();
      throw;
    }
  }
  void capture(std::size_t index, std::uintptr_t address) {
    call([&](auto& to) { to.gradients.capture(index, reinterpret_cast<const void*>(address)); });
  }
  void backward_begins() {
    call([](auto& to) { to.progress.backward_begins(); });
  }
  bool is_stale(std::size_t index) {
    return call([&](auto& to) { return to.parameters.is_stale(index); });
  }
  void magnitude(std::size_t index, double largest) {
    call([&](auto& to) { to.gradients.magnitude(index, largest); });
  }
  void look_at(std::size_t index, std::uintptr_t address) {
    call([&](auto& to) { to.gradients.look_at(index, reinterpret_cast<const void*>(address)); });
  }
  bool keeps_gradients() {
    return call([](auto& to) { return to.gradients.keeps_gradients(); });
  }
  replica::SharedParameters share(int memory) {
    return call([memory](auto& to) { return to.parameters.share(base::UniqueFd(memory)); });
  }
  bool last_micro_batch() {
    return call([](auto& to) { return to.progress.last_micro_batch(); });
  }
  bool wanted() {
    return call([](auto& to) { return to.progress.wanted(); });
  }
};

}  // namespace accelmgr::python
