// accelmgr._native.Statistics, CheckpointWritten and Resumed: what a manager says of itself and of
// checkpoints.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "accelmgr/checkpoint.hpp"
#include "accelmgr/statistics.hpp"
#include "engine/client/checkpoints.hpp"
#include "python/interpreter.hpp"
#include "python/memory.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

/// A value as accelmgr._memory.tensors.Described.
nb::tuple described(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape,
                    Memory memory) {
  return nb::make_tuple(name, nb::str(name_of(dtype).data()), tuple_of(shape), std::move(memory));
}

void bind_statistics(nb::module_& module) {
  nb::class_<RunnerStatistics>(module, "RunnerStatistics", "A runner of the team.")
      .def_ro("rank", &RunnerStatistics::rank)
      .def_ro("pid", &RunnerStatistics::pid, "0 while it is being replaced.")
      .def_ro("generation", &RunnerStatistics::generation, "How many processes this rank has had so far.")
      .def_ro("phase", &RunnerStatistics::phase, "init, waiting, forward, backward, vote, reduce, ...")
      .def_ro("attempt", &RunnerStatistics::attempt, "The last attempt that it took part in.")
      .def_ro("samples", &RunnerStatistics::samples, "Its samples in all committed steps.")
      .def_ro("peak_memory_bytes", &RunnerStatistics::peak_memory_bytes, "VmHWM of its process.")
      .def_ro("start_ms", &RunnerStatistics::start_ms,
              "Time from the fork of its process until it was ready.")
      .def_ro("model_ms", &RunnerStatistics::model_ms, "The part of start_ms in which it built the model.")
      .def("__repr__", [](const RunnerStatistics& self) {
        return fmt::format("RunnerStatistics(rank {}, pid {}, {}, {} samples)", self.rank, self.pid,
                           self.phase, self.samples);
      });
  nb::class_<Statistics>(module, "Statistics", "Counts of a session, over all its managers.")
      .def_ro("steps", &Statistics::steps, "Committed steps.")
      .def_ro("attempts", &Statistics::attempts)
      .def_ro("samples", &Statistics::samples, "Samples in all committed steps.")
      .def_ro("elements", &Statistics::elements,
              "Elements of the dataset that were consumed: `samples`, and those that were skipped.")
      .def_ro("skips", &Statistics::skips,
              "Attempts whose batches were left out (`on_nonfinite: skip_batch`).")
      .def_ro("replacements", &Statistics::replacements, "Runners that replaced lost ones.")
      .def_ro("losses", &Statistics::losses, "Runners and fork servers that were lost.")
      .def_ro("parameter_version", &Statistics::parameter_version)
      .def_ro("session_bytes", &Statistics::session_bytes, "Size of the session's shared memory.")
      .def_ro("manager_pid", &Statistics::manager_pid)
      .def_ro("manager_peak_memory_bytes", &Statistics::manager_peak_memory_bytes,
              "VmHWM of the manager process.")
      .def_ro("runners", &Statistics::runners, "The team, by rank.")
      .def("__repr__", [](const Statistics& self) {
        return fmt::format("Statistics({} steps, {} attempts, {} samples, {} losses, {} runners)", self.steps,
                           self.attempts, self.samples, self.losses, self.runners.size());
      });
}

void bind_checkpoints(nb::module_& module) {
  nb::class_<CheckpointWritten>(module, "CheckpointWritten", "The outcome of writing a checkpoint.")
      .def_ro("step", &CheckpointWritten::step)
      .def_ro("path", &CheckpointWritten::path)
      .def_ro("bytes", &CheckpointWritten::bytes)
      .def_ro("copy_ms", &CheckpointWritten::copy_ms, "How long save_checkpoint() blocked the host.")
      .def_ro("write_ms", &CheckpointWritten::write_ms,
              "How long the manager took to write it, in the background.")
      .def_ro("error", &CheckpointWritten::error, "Empty when the checkpoint has reached the disk.")
      .def_ro("warnings", &CheckpointWritten::warnings)
      .def("__repr__", [](const CheckpointWritten& self) {
        return fmt::format("CheckpointWritten(step {}: {})", self.step,
                           self.error.empty() ? self.path : "not written: " + self.error);
      });
  using Resumed = client::ResumedFrom;
  nb::class_<Resumed>(module, "Resumed", "The checkpoint from which a manager resumed.")
      .def_ro("path", &Resumed::path)
      .def_ro("step", &Resumed::step)
      .def_prop_ro(
          "tensors",
          [](const Resumed& self) {
            nb::list list;
            for (const auto& [name, dtype, shape, data] : self.tensors)
              list.append(described(name, dtype, shape, {data.get(), dense_bytes(dtype, shape), data}));
            return nb::module_::import_("accelmgr._memory.tensors").attr("named_tensors")(list);
          },
          nb::for_getter(nb::sig("def tensors(self) -> list[tuple[str, torch.Tensor]]")),
          "Copies of the tensors that were passed to save_checkpoint().")
      .def_ro("json", &Resumed::json)
      .def_ro("refused", &Resumed::refused, "Later checkpoints, each with the reason why it was not used.")
      .def_ro("run_id", &Resumed::run_id,
              "The id of the run that wrote it; empty if an earlier version of accelmgr wrote it.")
      .def_ro("configuration", &Resumed::configuration,
              "The configuration of the run that wrote it, as YAML; empty if it is not known.")
      .def_ro("extras_step", &Resumed::extras_step,
              "Of which step tensors and json are: less than `step` if a service has made steps since.")
      .def("__repr__",
           [](const Resumed& self) { return fmt::format("Resumed(step {}: {})", self.step, self.path); });
}

}  // namespace

void bind_records(nb::module_& module) {
  bind_statistics(module);
  bind_checkpoints(module);
}

}  // namespace accelmgr::python
