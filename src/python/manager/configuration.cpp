// What Python asks of the configuration.
#include "python/manager/handle.hpp"

#include <nanobind/stl/set.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>

#include "base/config/device_name.hpp"

namespace nb = nanobind;

namespace accelmgr::python {

std::set<std::string> Handle::set_keys() const {
  std::set<std::string> keys;
  for (const auto& [key, source] : loaded_.sources)
    if (source != "default") keys.insert(key);
  return keys;
}

void bind_configuration(HandleClass& type) {
  type.def_prop_ro(
          "device", [](const Handle& self) { return config::name_of(self.loaded().config.runners.device); },
          "runners.device.")
      .def_prop_ro("protects_parameters",
                   [](const Handle& self) { return self.loaded().config.runners.protect_parameters; })
      .def_prop_ro(
          "kinds",
          [](const Handle& self) {
            const auto& config = self.loaded().config;
            return std::pair(config.model.kind, config.data.kind);
          },
          "model.kind and data.kind.")
      .def_prop_ro(
          "replaces_runners",
          [](const Handle& self) { return self.loaded().config.runners.on_loss != LossPolicy::fail; })
      .def_prop_ro(
          "team_shrinks",
          [](const Handle& self) { return self.loaded().config.runners.on_loss == LossPolicy::shrink; })
      .def_prop_ro("keeps_last_step",
                   [](const Handle& self) { return self.loaded().config.data.keep_last_step; })
      .def_prop_ro("nprocs", [](const Handle& self) { return self.loaded().config.nprocs; })
      .def_prop_ro(
          "step_shape",
          [](const Handle& self) {
            const auto& config = self.loaded().config;
            return std::tuple(std::max(config.nprocs, config.runners.max_runners),
                              config.grad_accumulation_steps, config.batch_size_per_device);
          },
          "The most runners, grad_accumulation_steps, and batch_size_per_device.")
      .def_prop_ro("step_timeout", [](const Handle& self) { return self.loaded().config.step_timeout; })
      .def_prop_ro("set_keys", &Handle::set_keys, "Keys of the configuration that a source has set.")
      .def(
          "config", [](Handle& self) { return config::to_yaml(self.loaded().config); },
          "The whole configuration, as YAML.")
      .def_prop_ro(
          "epochs",
          [](const Handle& self) -> std::optional<int> {
            if (self.loaded().sources.at("data.epochs") == "default") return std::nullopt;
            return self.loaded().config.data.epochs;
          },
          "`data.epochs`; None if no source has set it.")
      .def(
          "unread",
          [](const Handle& self, bool own_model, bool own_data) {
            std::vector<std::tuple<std::string, std::string, std::string>> found;
            for (auto& [key, source, why] : config::unread(self.loaded(), {own_model, own_data}))
              found.emplace_back(key, source, why);
            return found;
          },
          nb::arg("own_model"), nb::arg("own_data"),
          "Keys that were set and have no effect, each with its source (\"flag\": `settings`) and the "
          "reason.");
}

}  // namespace accelmgr::python
