// The transport of a CUDA device (src/engine/device) for a replica of Python, which passes tensors and
// streams. accelmgr._runner.replica_cuda computes.
#include "base/cuda/device.hpp"

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>

#include "base/cuda/cuda_runtime.hpp"
#include "base/cuda/error.hpp"
#include "engine/device/batch_upload.hpp"
#include "engine/device/gradient_copies.hpp"
#include "engine/device/parameter_upload.hpp"
#include "engine/device/team_member.hpp"
#include "python/interpreter.hpp"
#include "python/memory.hpp"
#include "python/runner_side.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace accelmgr::python {
namespace {

/// A stream of the device.
struct DeviceStream {
  device::StreamHandle handle = nullptr;
};

/// A dense tensor of torch on the device, and where its bytes are in CPU memory.
using Part = std::pair<nb::object, std::size_t>;

std::span<std::byte> memory_of(nb::handle tensor) {
  return {reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")())),
          nb::cast<std::size_t>(tensor.attr("nbytes"))};
}

/// Throws if a tensor has other bytes than the transport copies.
std::byte* memory_of(nb::handle tensor, std::size_t bytes) {
  const auto memory = memory_of(tensor);
  if (memory.size() != bytes)
    throw std::invalid_argument(
        fmt::format("a tensor of {} bytes was passed where {} are copied", memory.size(), bytes));
  return memory.data();
}

template <class To>
std::vector<To> parts_of(const std::vector<Part>& parts) {
  std::vector<To> converted;
  converted.reserve(parts.size());
  for (const auto& [tensor, offset] : parts) {
    const auto memory = memory_of(tensor);
    converted.push_back({memory.data(), offset, memory.size()});
  }
  return converted;
}

/// Device 0 of this process. One thread uses it at a time; members that wait release the interpreter's lock.
class CudaTransport {
  /// Calls `body` through the runner, while other threads of Python run: it may wait for the device, and in a
  /// team for other ranks.
  template <class Body>
  auto unlocked(Body&& body) {
    return runner_.call([&](auto&) {
      const Unlocked release;
      return body();
    });
  }

 public:
  CudaTransport(RunnerSide& runner, const std::string& library, const DeviceStream& compute,
                const DeviceStream& batches, const std::vector<nb::object>& parameters, double timeout_s)
      : runner_(runner),
        device_(library.empty() ? device::load_cuda_runtime(device::cuda_runtime_candidates({}))
                                : device::load_cuda_runtime_at(library),
                0),
        compute_(compute.handle),
        joined_(device_.make_event()),
        parameters_(device_, *runner.binding, targets_of(parameters), compute_),
        gradients_(device_, *runner.binding, compute_, timeout_s),
        batches_(device_, runner.binding->progress, batches.handle, compute_, timeout_s),
        results_(device_, compute_),
        timeout_s_(timeout_s) {}

  bool begin_attempt() {
    return unlocked([&] { return gradients_.begin_attempt(); });
  }
  void begin_work() { gradients_.begin_work(); }
  void load_parameters() {
    unlocked([&] { parameters_.load(); });
  }
  replica::TeamMember& team_member(const std::string& library) {
    const auto nccl =
        library.empty() ? device::load_nccl(device::nccl_candidates({})) : device::load_nccl_at(library);
    return team_member_.emplace(device_, nccl, gradients_, parameters_, runner_.binding->progress,
                                timeout_s_);
  }

  std::optional<Memory> stage(std::size_t bytes) {
    const auto memory = unlocked([&] { return batches_.stage(bytes); });
    if (!memory) return std::nullopt;
    return Memory{memory->data(), memory->size()};
  }
  void load(const std::vector<Part>& parts) { batches_.load(parts_of<device::BatchUpload::Part>(parts)); }
  void load_behind(const std::vector<Part>& parts) {
    batches_.load_behind(parts_of<device::BatchUpload::Part>(parts));
  }

  void join(const DeviceStream& stream) {
    device_.record(joined_, stream.handle);
    device_.wait(compute_, joined_);
  }
  bool rounds(std::size_t index) const { return gradients_.rounds(index); }
  void complete_in_graph(std::size_t index) {
    auto& event = complete_[index];
    if (event == nullptr) event = device_.make_event();
    device_.record_in_graph(event, compute_);
  }
  void written(std::size_t index, nb::handle gradient, bool in_graph) {
    const auto& entry = runner_.binding->manifest.tensors.at(index);
    const auto* memory =
        memory_of(gradient, entry.elements() *
                                session::bytes_of(rounds(index) ? entry.types.slab : entry.types.gradient));
    unlocked([&] { gradients_.written(index, memory, in_graph ? &complete_.at(index) : nullptr); });
  }

  Memory read(const std::vector<Part>& parts, std::size_t bytes) {
    const auto copied = parts_of<device::Results::Part>(parts);
    const Unlocked unlocked;
    const auto memory = results_.read(copied, bytes);
    return {const_cast<std::byte*>(memory.data()), memory.size()};
  }
  bool finish() {
    return unlocked([&] { return gradients_.finish(); });
  }

 private:
  std::vector<std::byte*> targets_of(const std::vector<nb::object>& parameters) const {
    std::vector<std::byte*> targets;
    for (const auto& parameter : parameters) {
      const auto& entry = runner_.binding->manifest.tensors.at(targets.size());
      targets.push_back(
          parameter.is_none() ? nullptr : memory_of(parameter, entry.count * size_of(entry.runner_dtype)));
    }
    return targets;
  }

  RunnerSide& runner_;
  device::Device device_;
  device::StreamHandle compute_;
  device::Event joined_;
  std::map<std::size_t, device::Event> complete_;  ///< By parameter: its gradient in a graph is complete.
  device::ParameterUpload parameters_;
  device::GradientCopies gradients_;
  device::BatchUpload batches_;
  device::Results results_;
  double timeout_s_;
  std::optional<device::TeamMember> team_member_;
};

}  // namespace

void bind_device(nb::module_& module) {
  module.def(
      "blame_of",
      [](const nb::bytes& text) {
        const auto blame = device::blame_of({text.c_str(), text.size()});
        return blame == device::Blame::none ? "none" : blame == device::Blame::model ? "model" : "device";
      },
      "text"_a,
      "Who is to blame for an error with this text: 'device', 'model' (a kernel has refused its input), or "
      "'none': it does not speak of a device.");
  nb::class_<DeviceStream>(module, "DeviceStream", "A stream of a CUDA device.")
      .def(
          "__init__",
          [](DeviceStream* self, std::uintptr_t handle) {
            new (self) DeviceStream{reinterpret_cast<device::StreamHandle>(handle)};
          },
          "handle"_a, "handle: as torch.cuda.Stream.cuda_stream.")
      .def("__eq__", [](const DeviceStream& self, nb::handle other) {
        return nb::isinstance<DeviceStream>(other) && self.handle == nb::cast<DeviceStream&>(other).handle;
      });
  const nb::class_<replica::TeamMember> team_member(module, "TeamMember", "The part of a device in teams.");
  nb::class_<CudaTransport>(module, "CudaTransport",
                            "Carries parameters and batches to device 0 of this process, and gradients back.")
      .def(nb::init<RunnerSide&, const std::string&, const DeviceStream&, const DeviceStream&,
                    const std::vector<nb::object>&, double>(),
           nb::kw_only(), "runner"_a, "library"_a, "compute"_a, "batches"_a, "parameters"_a, "timeout_s"_a,
           "library: CUDA's runtime; empty for the one that torch uses. parameters: a tensor with the memory "
           "of each; None for one that shares another's.")
      .def("begin_attempt", &CudaTransport::begin_attempt,
           "Awaits what an attempt has queued that was left. Raises DeviceError when that takes longer than "
           "if it "
           "had not been left. False: this attempt is over before.")
      .def("begin_work", &CudaTransport::begin_work, "Work of the attempt is queued from now on.")
      .def("load_parameters", &CudaTransport::load_parameters,
           "Queues the copies of all parameters; what is computed from now on begins after them.")
      .def("team_member", &CudaTransport::team_member, "library"_a, nb::rv_policy::reference_internal,
           "library: NCCL; empty for the one that torch uses. Raises UsageError without it.")
      .def(
          "stage", &CudaTransport::stage, "size"_a,
          "Memory for what the next load() copies. Waits until the device has read what lay there. None: the "
          "attempt is over.")
      .def("load", &CudaTransport::load, "parts"_a,
           "Queues copies of staged memory to dense tensors: each with its offset. What is computed from now "
           "on "
           "begins after them; what is queued already may still run, so the targets must be new.")
      .def("load_behind", &CudaTransport::load_behind, "parts"_a,
           "The same behind the work that is queued, for targets that it may still use.")
      .def("join", &CudaTransport::join, "stream"_a,
           "What is computed from now on begins after the work that is queued on `stream`.")
      .def("rounds", &CudaTransport::rounds, "index"_a,
           "Whether written() takes the gradient of parameter `index` rounded to bfloat16 in this attempt, "
           "and a "
           "complex number as two.")
      .def("complete_in_graph", &CudaTransport::complete_in_graph, "index"_a,
           "What was recorded so far completes the gradient of parameter `index`, in the graph under way.")
      .def("written", &CudaTransport::written, "index"_a, "gradient"_a, "in_graph"_a = false,
           "The work queued so far completes the dense gradient of parameter `index`, which stays. in_graph: "
           "so does that which a graph has in front of complete_in_graph(); it has been launched.")
      .def("read", &CudaTransport::read, "parts"_a, "size"_a,
           "Queues copies of dense tensors, each to its offset in the memory that it returns. The values are "
           "there "
           "after finish().")
      .def("finish", &CudaTransport::finish,
           "Waits for the device, and hands over all gradients. False: the attempt is over.");
}

}  // namespace accelmgr::python
