// Checkpoints, and what a later run goes on from.
#include "python/manager/handle.hpp"

namespace nb = nanobind;

namespace accelmgr::python {

void bind_checkpoints(HandleClass& type) {
  type.def(
          "save_checkpoint",
          [](Handle& self, std::optional<double> metric, const std::vector<Addressed>& tensors,
             const std::string& json) {
            client::Extras extras{
                .metric = metric, .tensors = values_of<CheckpointError>(tensors), .json = json};
            return waiting([&, &m = self.started()] { return m.save_checkpoint(extras); });
          },
          nb::arg("metric").none(), nb::arg("tensors"), nb::arg("json"),
          "Returns the ms for which it blocked the caller.")
      .def(
          "checkpoints_written",
          [](Handle& self, nb::typed<nb::list, CheckpointWritten> told, double wait_s) {
            std::vector<CheckpointWritten> written;
            const auto tell = [&] {
              for (auto& each : written) told.append(nb::cast(std::move(each)));
            };
            try {
              waiting([&, &m = self.started()] { written = m.checkpoints_written(wait_s); });
            } catch (const nb::python_error&) {
              tell();
              throw;
            }
            tell();
          },
          nb::arg("told"), nb::arg("wait_s"),
          "Appends them to `told`, also if it then raises what a signal handler has raised.")
      .def_prop_ro("checkpoint_requested", [](Handle& self) { return self.started().checkpoint_requested(); })
      .def_prop_ro("resumed", [](Handle& self) { return self.started().resumed(); })
      .def(
          "continuation", [](Handle& self) { return self.started().continuation(); },
          "Where it stands, after stop(): for start() of a manager of a changed model.")
      .def_prop_ro("run_id", [](Handle& self) { return self.started().run_id(); });
}

}  // namespace accelmgr::python
