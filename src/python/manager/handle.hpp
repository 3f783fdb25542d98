// accelmgr._native.Handle: the host's side of a manager, with memory instead of tensors. Each source of this
// folder binds one part of it.
#pragma once

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"
#include "engine/client/handle.hpp"
#include "python/interpreter.hpp"
#include "python/memory.hpp"
#include "python/place.hpp"

namespace accelmgr::python {

/// Name, dtype, shape, address of a dense tensor of Python. The caller keeps it alive during the call.
using Addressed = std::tuple<std::string, std::string, std::vector<std::int64_t>, std::uintptr_t>;

template <class Exception>
std::vector<client::Value> values_of(const std::vector<Addressed>& tensors) {
  std::vector<client::Value> values;
  values.reserve(tensors.size());
  for (const auto& [name, dtype, shape, address] : tensors)
    values.push_back({name, dtype_named<Exception>(dtype, fmt::format("'{}'", name)), shape,
                      reinterpret_cast<const std::byte*>(address)});
  return values;
}

/// The numbers of a group: learning rate, weight decay, momentum, beta1, beta2, epsilon, nesterov.
using GroupNumbers = std::tuple<double, double, double, double, double, double, bool>;
/// sgd, adam or adamw; to which norm gradients are clipped, or 0; the groups, at most 16.
using UpdateNumbers = std::tuple<std::string, double, std::vector<GroupNumbers>>;

/// Name, dtype, shape and content of a buffer.
using BufferValue =
    nanobind::typed<nanobind::tuple, nanobind::str, nanobind::str, NumberTuple, nanobind::bytearray>;

/// Runs `body` without the interpreter's lock, so that other threads of Python can run.
template <class Body>
auto unlocked(Body&& body) {
  const Unlocked release;
  return body();
}

/// See accelmgr._native.Handle.
class Handle {
 public:
  Handle(const std::string& file, const std::vector<std::pair<std::string, std::string>>& settings,
         const std::map<std::string, std::string>& environment);

  /// Calls `prepared` when there is a session, but no runner yet: parameters() and gradients() work from then
  /// on. `command`: another program, which becomes the manager.
  void start(const std::string& start_method,
             const nanobind::typed<nanobind::callable, nanobind::object(bool)>& prepared,
             const std::vector<std::string>& command, const std::string& continues);
  /// Attaches to the service at `path`. Its configuration takes the place of this one's.
  void attach(const std::string& path, const std::string& name, double timeout_s, bool keep_gradients);

  client::Handle& started() {
    if (!handle_) throw UsageError("this manager was not started; call start()");
    return *handle_;
  }
  bool is_started() const noexcept { return handle_.has_value(); }

  std::vector<Place> parameters() const;
  /// Another copy of the parameters, without values: its memfd, which is open as long as a place lives, and
  /// the places.
  std::pair<int, std::vector<Place>> shared_parameters() const;
  /// None for a parameter that the session has no gradient of: it is frozen.
  std::vector<std::optional<Place>> gradients() const;
  using Moments = std::vector<std::optional<Place>>;
  /// The first moments of the parameters, and the second ones; None for those that the session cannot update.
  std::pair<Moments, Moments> moments() const;
  std::vector<std::uint64_t> updates();

  /// Each buffer's name, and its further names.
  std::vector<std::pair<std::string, std::vector<std::string>>> persistent_buffers() const;
  /// Copies of the buffers of the last committed step.
  nanobind::typed<nanobind::list, BufferValue> buffers();
  /// The name of each buffer, and its shape.
  std::vector<std::pair<std::string, NumberTuple>> buffer_shapes() const;
  /// Copies the buffers of the last committed step to the addresses of dense tensors, in the order of
  /// buffer_shapes(); 0: not this one. Does not write what is the same.
  void copy_buffers(const std::vector<std::uintptr_t>& to) const;
  /// The indices of the buffers whose bytes differ from those at the addresses, which are as for
  /// copy_buffers().
  std::vector<std::size_t> differing_buffers(const std::vector<std::uintptr_t>& at) const;

  /// Appends the result to `made` before it throws what a signal handler raised: the step may have counted
  /// before that, and what this returned would be lost if the interpreter called the handler afterwards.
  void step(nanobind::typed<nanobind::list, StepResult> made, std::optional<double> timeout_s,
            bool accumulate, bool parameters_changed, bool repeat,
            std::optional<std::pair<std::uint32_t, std::uint64_t>> inner,
            const std::optional<UpdateNumbers>& update);
  void begin_service_steps(int count, std::optional<double> timeout_s, const UpdateNumbers& update);
  /// Whether the steps are under way, what has ended them, and the results after the first `known`.
  std::tuple<bool, std::string, std::vector<StepResult>> service_steps(std::size_t known);
  void while_waiting(const nanobind::typed<nanobind::callable, nanobind::object()>& work) { work_ = work; }

  const config::LoadedConfig& loaded() const noexcept { return loaded_; }

  /// Keys that a source other than the defaults has set.
  std::set<std::string> set_keys() const;

 private:
  std::vector<Place> parameters_in(std::byte* memory, const std::shared_ptr<const void>& owner) const;

  config::LoadedConfig loaded_;
  nanobind::object work_;  ///< Called while start() and step() wait.
  std::optional<client::Handle> handle_;
  std::shared_ptr<const session::Session> session_;
  std::optional<session::HostView> view_;
  session::Manifest manifest_;
};

using HandleClass = nanobind::class_<Handle>;
void bind_configuration(HandleClass& type);
void bind_steps(HandleClass& type);
void bind_moments(HandleClass& type);
void bind_tensors(HandleClass& type);
/// Also binds the class Writing.
void bind_writing(nanobind::module_& module, HandleClass& type);
void bind_checkpoints(HandleClass& type);

}  // namespace accelmgr::python
