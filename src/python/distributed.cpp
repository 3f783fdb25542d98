// accelmgr/distributed.hpp for Python. All calls that wait for others let go of the interpreter's lock.
#include "accelmgr/distributed.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "accelmgr/multiprocess.hpp"
#include "python/interpreter.hpp"
#include "python/tensors.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

using distributed::Group;
using distributed::GroupArgument;
using distributed::Value;

std::string binary_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

void initialize(const std::string& backend, std::optional<double> timeout_s, const std::string& init_method,
                std::optional<int> rank, std::optional<int> world_size) {
  waiting([&] {
    distributed::initialize(
        backend,
        {.timeout_s = timeout_s, .init_method = init_method, .rank = rank, .world_size = world_size});
  });
}

nb::bytes broadcast_bytes(const nb::bytes& bytes, int src) {
  auto text = binary_of(bytes);
  text = waiting([&] { return distributed::broadcast(text, src); });
  return nb::bytes(text.data(), text.size());
}

nb::list all_gather_bytes(const nb::bytes& bytes, const GroupArgument& group) {
  const auto text = binary_of(bytes);
  const auto gathered = waiting([&] {
    return distributed::all_gather_object(Value::binary({text.begin(), text.end()}), group);
  });
  nb::list all;
  for (const auto& value : gathered) {
    const auto& binary = value.get_binary();
    all.append(nb::bytes(binary.data(), binary.size()));
  }
  return all;
}

void send_bytes(const nb::bytes& bytes, int to) {
  const auto text = binary_of(bytes);
  waiting([&] { distributed::send_object(Value::binary({text.begin(), text.end()}), to); });
}

nb::bytes receive_bytes(int from) {
  const auto value = waiting([&] { return distributed::receive_object(from); });
  const auto& binary = value.get_binary();
  return nb::bytes(binary.data(), binary.size());
}

void bind_context(nb::module_& module) {
  module.def("dist_backend", &distributed::backend);
  module.def("dist_available_backends", &distributed::available_backends);
  module.def("dist_model_name", &distributed::model_name);
  module.def("dist_device", [] { return distributed::device().str(); });
  module.def("dist_rank", &distributed::get_rank);
  module.def("dist_local_rank", &distributed::get_local_rank);
  module.def("dist_world_size", &distributed::get_world_size);
  module.def("dist_nproc_per_node", &distributed::get_nproc_per_node);
  module.def("dist_nnodes", &distributed::get_nnodes);
  module.def("dist_node_rank", &distributed::get_node_rank);
  module.def("dist_hostname", &distributed::hostname);
  module.def("dist_set_local_rank", &distributed::set_local_rank, nb::arg("index"));
  module.def("dist_sync", &distributed::sync, nb::arg("temporary"));
  module.def("dist_initialize", &initialize, nb::arg("backend"), nb::arg("timeout").none(),
             nb::arg("init_method"), nb::arg("rank").none(), nb::arg("world_size").none());
  module.def("dist_finalize", interruptible(&distributed::finalize));
}

void bind_groups(nb::module_& module) {
  nb::class_<Group>(module, "Group")
      .def_prop_ro("ranks", &Group::ranks, "Ranks in the world, ascending.")
      .def_prop_ro("rank", &Group::rank, "Of this process within; -1 outside.")
      .def_prop_ro("size", &Group::size)
      .def("contains", &Group::contains, nb::arg("rank"));
  module.def("dist_new_group", interruptible(&distributed::new_group), nb::arg("ranks"),
             nb::arg("backend").none());
  module.def(
      "init_parallelism",
      [](int model, int pipeline, const std::optional<std::string>& model_backend,
         const std::optional<std::string>& pipeline_backend, const std::optional<std::string>& data_backend) {
        const auto groups = waiting(
            [&] { return init_parallelism(model, pipeline, model_backend, pipeline_backend, data_backend); });
        return std::vector<Group>{groups.model, groups.pipeline, groups.data};
      },
      nb::arg("model_parallelism"), nb::arg("pipeline_parallelism"), nb::arg("model_backend").none(),
      nb::arg("pipeline_backend").none(), nb::arg("data_backend").none());
  module.def("parallel_groups", [] {
    const auto& groups = parallel_groups();
    return std::vector<Group>{groups.model, groups.pipeline, groups.data};
  });
}

void bind_collectives(nb::module_& module) {
  using distributed::all_gather, distributed::all_reduce;
  module.def("dist_barrier", [] { waiting([] { distributed::barrier(); }); });
  module.def(
      "dist_all_reduce",
      [](const at::Tensor& tensor, const std::string& op, const GroupArgument& group) {
        return waiting([&] { return all_reduce(tensor, op, group); });
      },
      nb::arg("tensor"), nb::arg("op"), nb::arg("group").none());
  module.def(
      "dist_all_gather",
      [](const at::Tensor& tensor, const GroupArgument& group) {
        return waiting([&] { return all_gather(tensor, group); });
      },
      nb::arg("tensor"), nb::arg("group").none());
  module.def(
      "dist_reduce_scatter",
      [](const at::Tensor& tensor, const std::string& op, const GroupArgument& group) {
        return waiting([&] { return distributed::reduce_scatter(tensor, op, group); });
      },
      nb::arg("tensor"), nb::arg("op"), nb::arg("group").none());
  module.def(
      "dist_all_to_all",
      [](const at::Tensor& tensor, const GroupArgument& group) {
        return waiting([&] { return distributed::all_to_all(tensor, group); });
      },
      nb::arg("tensor"), nb::arg("group").none());
  module.def(
      "dist_broadcast",
      [](const at::Tensor& tensor, int src) {
        return waiting([&] { return distributed::broadcast(tensor, src); });
      },
      nb::arg("tensor"), nb::arg("src"));
  module.def("dist_broadcast_bytes", &broadcast_bytes, nb::arg("data"), nb::arg("src"));
  module.def(
      "dist_all_gather_text",
      [](const std::string& text, const GroupArgument& group) {
        return waiting([&] { return all_gather(text, group); });
      },
      nb::arg("text"), nb::arg("group").none());
  module.def("dist_all_gather_bytes", &all_gather_bytes, nb::arg("data"), nb::arg("group").none(),
             nb::sig("def dist_all_gather_bytes(data: bytes, group: Group | collections.abc.Sequence[int] | "
                     "None) -> list[bytes]"));
  module.def("dist_send_bytes", &send_bytes, nb::arg("data"), nb::arg("to"));
  module.def("dist_receive_bytes", &receive_bytes, nb::arg("source"));
}

}  // namespace

void bind_distributed(nb::module_& module) {
  bind_context(module);
  bind_groups(module);
  bind_collectives(module);
}

}  // namespace accelmgr::python
