// accelmgr/distributed.hpp for Python. All calls that wait for other ranks release the interpreter's lock.
#include "accelmgr/distributed_context.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "accelmgr/multiprocess_launch.hpp"
#include "launcher/distributed/collectives/arrays.hpp"
#include "launcher/distributed/collectives/objects.hpp"
#include "python/interpreter.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

using distributed::Group;
using distributed::GroupArgument;

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
  const auto gathered = waiting([&] { return distributed::all_gather_bytes(text, group); });
  nb::list all;
  for (const auto& one : gathered) all.append(nb::bytes(one.data(), one.size()));
  return all;
}

void bind_context(nb::module_& module) {
  module.def("dist_backend", &distributed::backend);
  module.def("dist_available_backends", &distributed::available_backends);
  module.def("dist_model_name", &distributed::model_name);
  module.def("dist_device", &distributed::device_name);
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
  nb::class_<Group>(module, "Group", "The ranks of a process group.")
      .def_prop_ro("ranks", &Group::ranks, "Ranks in the world, ascending.")
      .def_prop_ro("rank", &Group::rank, "The rank of this process within the group; -1 outside.")
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

// A tensor is passed as address, dtype and shape of dense memory.

using Shape = std::vector<std::int64_t>;
/// A device of this process, by its number, and a stream of it.
using StreamPlace = std::tuple<int, std::uintptr_t>;

/// Number of ranks that communicate. 0: this process is outside the group, or alone in the world.
int count_members(const GroupArgument& group) {
  return waiting([&] {
    const auto members = distributed::members_of(group);
    return members.communicate() ? members.communicator->size() : 0;
  });
}

/// Makes the collective that `call` names. `out` is the address of the memory for the result; a broadcast
/// sends and receives it. The caller keeps both alive. Without `place` they are on the CPU. Returns false if
/// the members have agreed to make the call in CPU memory instead. Throws UsageError without other ranks.
bool collective(const std::string& call, std::uintptr_t data, const std::string& dtype, const Shape& shape,
                std::uintptr_t out, const std::string& op, int src, const GroupArgument& group,
                const std::optional<StreamPlace>& place) {
  const auto operation = distributed::reduce_op(op);
  const distributed::Array in{reinterpret_cast<const void*>(data), distributed::collective_dtype(dtype),
                              shape};
  auto* const to = reinterpret_cast<void*>(out);
  return waiting([&] {
    const auto members = distributed::members_of(group);
    if (!members.communicate())
      throw UsageError(
          "this rank cannot make a collective call: it is outside the group, or alone in the world");
    distributed::OnDevice there;
    if (place) there = {std::get<0>(*place), reinterpret_cast<device::StreamHandle>(std::get<1>(*place))};
    const auto* at = place ? &there : nullptr;
    if (call == "all_reduce") return distributed::all_reduce(members, in, to, operation, at);
    if (call == "reduce_scatter") return distributed::reduce_scatter(members, in, to, operation, at);
    if (call == "all_gather") return distributed::all_gather(members, in, to, at);
    if (call == "all_to_all") return distributed::all_to_all(members, in, to, at);
    return distributed::broadcast(members, in, to, src, at);
  });
}

void bind_collectives(nb::module_& module) {
  module.def(
      "dist_check_dtype", [](const std::string& name) { distributed::collective_dtype(name); },
      nb::arg("name"), "Raises UsageError for a dtype that collectives do not support.");
  module.def("dist_barrier", [] { waiting([] { distributed::barrier(); }); });
  module.def("dist_members", &count_members, nb::arg("group").none(),
             "How many take part in a collective; 0: this process has no other rank to communicate with.");
  module.def("dist_collective", &collective, nb::arg("call"), nb::arg("data"), nb::arg("dtype"),
             nb::arg("shape"), nb::arg("out"), nb::arg("op"), nb::arg("src"), nb::arg("group").none(),
             nb::arg("place").none(),
             "Makes the collective that `call` names. False: it is to be made in CPU memory.");
  module.def("dist_use_device_libraries", &distributed::use_device_libraries, nb::arg("cuda"),
             nb::arg("nccl"), "The paths of CUDA's runtime and of NCCL, for tests.");
  module.def("dist_broadcast_bytes", &broadcast_bytes, nb::arg("data"), nb::arg("src"));
  module.def(
      "dist_all_gather_text",
      [](const std::string& text, const GroupArgument& group) {
        return waiting([&] { return distributed::all_gather(text, group); });
      },
      nb::arg("text"), nb::arg("group").none());
  module.def("dist_all_gather_bytes", &all_gather_bytes, nb::arg("data"), nb::arg("group").none(),
             nb::sig("def dist_all_gather_bytes(data: bytes, group: Group | collections.abc.Sequence[int] | "
                     "None) -> list[bytes]"));
}

}  // namespace

void bind_distributed(nb::module_& module) {
  bind_context(module);
  bind_groups(module);
  bind_collectives(module);
  register_torch();
}

}  // namespace accelmgr::python
