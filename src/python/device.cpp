// The transport of a CUDA device (src/engine/device) for a replica of Python, which passes addresses and
// sizes. accelmgr._runner.replica_cuda computes.
#include "base/cuda/device.hpp"

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "base/cuda/cuda_runtime.hpp"
#include "base/cuda/error.hpp"
#include "engine/device/batch_upload.hpp"
#include "engine/device/gradient_copies.hpp"
#include "engine/device/parameter_upload.hpp"
#include "engine/device/team_member.hpp"
#include "python/interpreter.hpp"
#include "python/memory.hpp"
#include "python/sink.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace accelmgr::python {
namespace {

using Address = std::uintptr_t;
/// Address on the device, offset in host memory, bytes.
using Part = std::tuple<Address, std::size_t, std::size_t>;

device::StreamHandle stream_at(Address address) { return reinterpret_cast<device::StreamHandle>(address); }

std::vector<std::byte*> pointers_of(const std::vector<Address>& addresses) {
  std::vector<std::byte*> pointers;
  pointers.reserve(addresses.size());
  for (const auto address : addresses) pointers.push_back(reinterpret_cast<std::byte*>(address));
  return pointers;
}

template <class To>
std::vector<To> parts_of(const std::vector<Part>& parts) {
  std::vector<To> converted;
  converted.reserve(parts.size());
  for (const auto& [address, offset, bytes] : parts)
    converted.push_back({reinterpret_cast<std::byte*>(address), offset, bytes});
  return converted;
}

/// Device 0 of this process. One thread uses it at a time; members that wait release the interpreter's lock.
class CudaTransport {
  /// Calls `body` through the sink, while other threads of Python run: it may wait for the device, and in a
  /// team for other ranks.
  template <class Body>
  auto unlocked(Body&& body) {
    return sink_.call([&](auto&) {
      const Unlocked release;
      return body();
    });
  }

 public:
  CudaTransport(Sink& sink, const std::string& library, Address compute, Address batches,
                const std::vector<Address>& parameters, double timeout_s)
      : sink_(sink),
        device_(library.empty() ? device::load_cuda_runtime(device::cuda_runtime_candidates({}))
                                : device::load_cuda_runtime_at(library),
                0),
        compute_(stream_at(compute)),
        joined_(device_.make_event()),
        parameters_(device_, *sink.manifest, sink.places, pointers_of(parameters), *sink.sink, compute_),
        gradients_(device_, *sink.manifest, *sink.sink, compute_, timeout_s),
        batches_(device_, *sink.sink, stream_at(batches), compute_, timeout_s),
        results_(device_, compute_),
        timeout_s_(timeout_s) {}

  bool begin_attempt() {
    return unlocked([&] { return gradients_.begin_attempt(); });
  }
  void begin_work() { gradients_.begin_work(); }
  void load_parameters() {
    unlocked([&] { parameters_.load(); });
  }
  void split_parameters(std::vector<std::vector<std::size_t>> parts) { parameters_.split(std::move(parts)); }
  void await_parameters(std::size_t part, Address stream) { parameters_.await(part, stream_at(stream)); }
  /// A replica::TeamMember.
  Address team_member(const std::string& library) {
    const auto nccl =
        library.empty() ? device::load_nccl(device::nccl_candidates({})) : device::load_nccl_at(library);
    team_member_.emplace(device_, nccl, gradients_, parameters_, *sink_.sink, timeout_s_);
    return reinterpret_cast<Address>(static_cast<replica::TeamMember*>(&*team_member_));
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

  void join(Address stream) {
    device_.record(joined_, stream_at(stream));
    device_.wait(compute_, joined_);
  }
  void complete_in_graph(std::size_t index) {
    auto& event = complete_[index];
    if (event == nullptr) event = device_.make_event();
    device_.record_in_graph(event, compute_);
  }
  void written(std::size_t index, Address gradient, bool in_graph) {
    unlocked([&] {
      gradients_.written(index, reinterpret_cast<const std::byte*>(gradient),
                         in_graph ? &complete_.at(index) : nullptr);
    });
  }

  Memory read(const std::vector<Part>& parts, std::size_t bytes) {
    const Unlocked unlocked;
    const auto memory = results_.read(parts_of<device::Results::Part>(parts), bytes);
    return {const_cast<std::byte*>(memory.data()), memory.size()};
  }
  bool finish() {
    return unlocked([&] { return gradients_.finish(); });
  }

 private:
  Sink& sink_;
  device::Device device_;
  device::StreamHandle compute_;
  device::Event joined_;
  std::map<std::size_t, device::Event> complete_;  ///< Of gradients in graphs.
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
  nb::class_<CudaTransport>(module, "CudaTransport",
                            "Carries parameters and batches to device 0 of this process, and gradients back.")
      .def(nb::init<Sink&, const std::string&, Address, Address, const std::vector<Address>&, double>(),
           nb::kw_only(), "sink"_a, "library"_a, "compute"_a, "batches"_a, "parameters"_a, "timeout_s"_a,
           "library: CUDA's runtime; empty for the one that torch uses. compute, batches: streams. "
           "parameters: "
           "where each is on the device; 0 for one that shares another's memory.")
      .def("begin_attempt", &CudaTransport::begin_attempt,
           "Awaits what an attempt has queued that was left. Raises DeviceError when that takes longer than "
           "if it "
           "had not been left. False: this attempt is over before.")
      .def("begin_work", &CudaTransport::begin_work, "Work of the attempt is queued from now on.")
      .def("load_parameters", &CudaTransport::load_parameters,
           "Queues the copies of all parameters; what is computed from now on begins after those of part 0.")
      .def("split_parameters", &CudaTransport::split_parameters, "parts"_a,
           "Parameters are copied in this order from now on.")
      .def("await_parameters", &CudaTransport::await_parameters, "part"_a, "stream"_a,
           "What is computed on `stream` from now on begins after the copies of that part, and of those "
           "before it.")
      .def("team_member", &CudaTransport::team_member, "library"_a,
           "The address of the device's part in teams, which live as long as this. library: NCCL; empty for "
           "the one that torch uses. Raises UsageError without it.")
      .def(
          "stage", &CudaTransport::stage, "size"_a,
          "Memory for what the next load() copies. Waits until the device has read what lay there. None: the "
          "attempt is over.")
      .def("load", &CudaTransport::load, "parts"_a,
           "Queues copies of staged memory: address on the device, offset, bytes. What is computed from now "
           "on "
           "begins after them; what is queued already may still run, so the targets must be new.")
      .def("load_behind", &CudaTransport::load_behind, "parts"_a,
           "The same behind the work that is queued, for targets that it may still use.")
      .def("join", &CudaTransport::join, "stream"_a,
           "What is computed from now on begins after the work that is queued on `stream`.")
      .def("complete_in_graph", &CudaTransport::complete_in_graph, "index"_a,
           "What was recorded so far completes the gradient of parameter `index`, in the graph under way.")
      .def("written", &CudaTransport::written, "index"_a, "address"_a, "in_graph"_a = false,
           "The work queued so far completes the dense gradient of parameter `index` at `address`. in_graph: "
           "so does that which a graph has in front of complete_in_graph(); it has been launched.")
      .def(
          "read", &CudaTransport::read, "parts"_a, "size"_a,
          "Queues copies to the memory that it returns: address on the device, offset, bytes. The values are "
          "there after finish().")
      .def("finish", &CudaTransport::finish,
           "Waits for the device, and hands over all gradients. False: the attempt is over.");
}

}  // namespace accelmgr::python
