// Steps of the host, and those that a service makes.
#include "python/manager/handle.hpp"

#include <nanobind/stl/string_view.h>

#include <array>
#include <string_view>

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

session::Update update_of(const UpdateNumbers& numbers) {
  using Kind = session::Update::Kind;
  const auto& [kind, clip_norm, groups] = numbers;
  session::Update update{.kind = kind == "sgd"    ? Kind::sgd
                                 : kind == "adam" ? Kind::adam
                                                  : Kind::adamw,
                         .leaves_absent = 1,
                         .clip_norm = clip_norm};
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto& [rate, decay, momentum, beta1, beta2, epsilon, nesterov] = groups[i];
    update.groups[i % session::max_update_groups] = {rate, decay, momentum, beta1, beta2, epsilon, nesterov};
  }
  return update;
}

}  // namespace

void Handle::step(nb::typed<nb::list, StepResult> made, std::optional<double> timeout_s, bool accumulate,
                  bool parameters_changed, bool repeat,
                  std::optional<std::pair<std::uint32_t, std::uint64_t>> inner,
                  const std::optional<UpdateNumbers>& update) {
  auto& handle = started();
  Interruption interruption(work_.ptr());
  StepResult result;
  try {
    const Unlocked unlocked;
    const StepOptions options{.timeout_s = timeout_s,
                              .accumulate = accumulate,
                              .repeat = repeat,
                              .parameters_changed = parameters_changed,
                              .interrupted = interruption.hook()};
    result = update ? handle.step(options, update_of(*update))
                    : handle.step(options, !inner              ? client::StepKind::outer
                                           : inner->second > 0 ? client::StepKind::inner
                                                               : client::StepKind::first_inner);
    result.repeated = inner ? inner->first : 0;
  } catch (...) {
    interruption.rethrow();
    throw;
  }
  try {
    interruption.rethrow();
  } catch (const nb::python_error&) {
    made.append(nb::cast(std::move(result)));
    throw;
  }
  made.append(nb::cast(std::move(result)));
}

void Handle::begin_service_steps(int count, std::optional<double> timeout_s, const UpdateNumbers& update) {
  auto& handle = started();
  const Unlocked unlocked;
  handle.begin_service_steps(count, {.timeout_s = timeout_s, .accumulate = false}, update_of(update));
}

std::tuple<bool, std::string, std::vector<StepResult>> Handle::service_steps(std::size_t known) {
  auto& handle = started();
  const Unlocked unlocked;
  auto steps = handle.service_steps(known);
  return {steps.under_way || !steps.is_all, std::move(steps.error), std::move(steps.results)};
}

void bind_steps(HandleClass& type) {
  type.def("while_waiting", &Handle::while_waiting, nb::arg("work"),
           "`work` is called about every 20 ms while start() and step() wait, in their thread.")
      .def("step", &Handle::step, nb::arg("made"), nb::arg("timeout") = nb::none(),
           nb::arg("accumulate") = true, nb::arg("parameters_changed") = true, nb::arg("repeat") = false,
           nb::arg("inner") = nb::none(), nb::arg("update") = nb::none(),
           "Appends the result to `made`, also if it then raises what a signal handler has raised. inner: of "
           "an inner step, how many were made again before it, and how many its runners have made since they "
           "have "
           "the optimizer. update: the session makes it, as a part of the step.")
      .def("begin_service_steps", &Handle::begin_service_steps, nb::arg("count"), nb::arg("timeout").none(),
           nb::arg("update"), "The service makes inner steps, also if this process ends.")
      .def("service_steps", &Handle::service_steps, nb::arg("known"),
           "Of these steps, or of those that attach() has found: whether there are more to come, what has "
           "ended "
           "them if that is in no result, and the results after the first `known`.")
      .def(
          "cancel_service_steps",
          [](Handle& self) { unlocked([&m = self.started()] { m.cancel_service_steps(); }); },
          "Ends them; blocks while one is under way.")
      .def_prop_ro(
          "found_steps", [](Handle& self) { return self.started().found_steps(); },
          "For how many steps attach() has found that nobody has waited.")
      .def_prop_ro(
          "left_gradients",
          [](Handle& self) {
            static constexpr std::array<std::optional<std::string_view>, 3> names = {std::nullopt,
                                                                                     "unapplied", "applied"};
            return names.at(static_cast<std::size_t>(self.started().left_gradients()));
          },
          "What an earlier host of a service has left: None, \"unapplied\" or \"applied\".")
      .def_prop_ro(
          "overwrites_next", [](Handle& self) { return self.started().overwrites_next(); },
          "Whether the next step overwrites gradients, whatever its arguments say.");
}

}  // namespace accelmgr::python
