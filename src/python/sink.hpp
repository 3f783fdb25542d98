// The sink of a runner as Python meets it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "base/cuda/error.hpp"
#include "engine/replica/replica.hpp"
#include "engine/session/manifest.hpp"

namespace accelmgr::python {

/// The hooks of Python call it. Its exceptions pass through autograd as exceptions of Python;
/// PythonReplica::called() throws the original again.
struct Sink {
  replica::Sink* sink = nullptr;
  // What a transport of a device needs beside it; set by Replica::bind().
  const session::Manifest* manifest = nullptr;
  std::vector<replica::Place> places{};
  std::exception_ptr thrown{};
  std::string loss_weight{};  ///< The number that each output must have (`loss_scaling: sum_over`), or empty.

  template <class Call>
  auto call(Call&& body) {
    try {
      return body(*sink);
    } catch (const device::DeviceError&) {
      throw;  // The replica of Python decides what it means.
    } catch (...) {
      thrown = std::current_exception();
      throw;
    }
  }
  void capture(std::size_t index, std::uintptr_t address) {
    call([&](auto& to) { to.capture(index, reinterpret_cast<const void*>(address)); });
  }
  void backward_begins() {
    call([](auto& to) { to.backward_begins(); });
  }
  bool is_stale(std::size_t index) {
    return call([&](auto& to) { return to.is_stale(index); });
  }
  void magnitude(std::size_t index, double largest) {
    call([&](auto& to) { to.magnitude(index, largest); });
  }
  void look_at(std::size_t index, std::uintptr_t address) {
    call([&](auto& to) { to.look_at(index, reinterpret_cast<const void*>(address)); });
  }
  bool keeps_gradients() {
    return call([](auto& to) { return to.keeps_gradients(); });
  }
  replica::SharedParameters share(int memory) {
    return call([memory](auto& to) { return to.share(base::UniqueFd(memory)); });
  }
  bool last_micro_batch() {
    return call([](auto& to) { return to.last_micro_batch(); });
  }
  bool wanted() {
    return call([](auto& to) { return to.wanted(); });
  }
};

}  // namespace accelmgr::python
