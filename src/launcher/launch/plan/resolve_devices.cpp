// Chooses the devices, the number of processes and the backend.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/did_you_mean.hpp"
#include "base/parse_number.hpp"
#include "base/split.hpp"
#include "launcher/launch/compat/variables.hpp"
#include "launcher/launch/plan/resolution.hpp"

namespace accelmgr::launch {
namespace {

const std::vector<std::string>& backends() {
  static const std::vector<std::string> all = {"serial", "shm", "gloo", "nccl"};
  return all;
}

bool is_of_cpus(const std::string& backend) {
  return backend == "serial" || backend == "shm" || backend == "gloo";
}

std::vector<std::string> available_backends(const NodeInfo& node_info) {
  auto names = backends();
  if (node_info.gpus == 0) std::erase(names, "nccl");
  return names;
}

void check_backend_name(const Resolution& r) {
  const auto& name = r.options.backend;
  if (name == "auto" || std::ranges::find(backends(), name) != backends().end() ||
      device_kind_of_backend(name) != nullptr)
    return;
  auto known = available_backends(r.node_info);
  known.emplace_back("auto");
  refuse("backend", fmt::format("unknown backend '{}'; available are {}{}", name, fmt::join(known, ", "),
                                base::did_you_mean(name, known)));
}

const std::string& selection(const Options& options, const DeviceKind& kind) {
  static const std::string none;
  if (kind.option == "gpus") return options.gpus;
  return kind.option == "xpus" ? options.xpus : none;
}

// The setting that asks for this kind of device, in words; empty if none does.
std::string asked_by(const Resolution& r, const DeviceKind& kind) {
  if (const auto& selected = selection(r.options, kind); !selected.empty())
    return fmt::format("option {} is '{}'", kind.option, selected);
  if (device_kind_of_backend(r.options.backend) == &kind)
    return fmt::format("backend is {}", r.options.backend);
  const bool configured = r.spec.xla.form == WorkerForm::worker && r.spec.xla.devices > 0;
  if (kind.name == "gpu" && configured && !is_of_cpus(r.options.backend))
    return fmt::format("{} is {}", variable::gpu_num_devices, r.spec.xla.devices);
  return "";
}

const DeviceKind* asked_kind(const Resolution& r) {
  const DeviceKind* asked = nullptr;
  for (const auto& kind : device_kinds()) {
    const auto why = asked_by(r, kind);
    if (why.empty()) continue;
    if (asked != nullptr)
      refuse(kind.option.empty() ? "backend" : kind.option,
             fmt::format("{}, and {}; a launch can use only one kind of device", asked_by(r, *asked), why));
    asked = &kind;
  }
  return asked;
}

[[noreturn]] void refuse_absent(const Resolution& r, const DeviceKind& kind) {
  std::vector<std::string> drivers;
  for (const auto& other : device_kinds())
    if (other.devices != nullptr) drivers.push_back(other.name);
  std::string why;
  if (kind.devices == nullptr)
    why = fmt::format("no {} device is present: this build has no driver for them; it has drivers for {}",
                      kind.name, fmt::join(drivers, " and "));
  else if (kind.count(r.node_info) == 0)
    why = fmt::format("this machine has no {}", kind.label);
  else
    why = fmt::format("none of the {} {}s of this machine is visible: {} is '{}'", kind.count(r.node_info),
                      kind.label, kind.visible, r.variable(kind.visible.c_str()));
  const auto& key = selection(r.options, kind).empty() ? std::string("backend") : kind.option;
  const bool by_backend = device_kind_of_backend(r.options.backend) == &kind;
  refuse(key, fmt::format("{}, but {}{}", asked_by(r, kind), why,
                          by_backend ? "; use backend shm on one node, gloo over several" : ""));
}

int default_nprocs(Resolution& r) {
  if (r.spec.xla.devices > 0) {
    r.from("nprocs", r.spec.sources.at("configured_devices"));
    return r.spec.xla.devices;
  }
  if (r.spec.xla.form == WorkerForm::worker)
    refuse("nprocs",
           fmt::format("{} names nodes, but not how many devices each of them has; set nprocs or {}",
                       r.worker_source, variable::gpu_num_devices));
  if (r.options.backend == "serial") {
    r.from("nprocs", "default: serial is one process");
    return 1;
  }
  if (r.kind->name == "cpu") {
    // A backend for CPUs on a node with GPUs: as many processes as without it.
    const auto& gpu = device_kind("gpu");
    const auto gpus = static_cast<int>(visible_devices(gpu, r.node_info).size());
    r.from("nprocs",
           gpus > 0 ? visible_source(gpu, r.node_info) : fmt::format("default: {} cores", r.node_info.cores));
    return gpus > 0 ? gpus : r.node_info.cores;
  }
  const auto& selected = selection(r.options, *r.kind);
  r.from("nprocs", selected.empty() ? visible_source(*r.kind, r.node_info) : "option " + r.kind->option);
  return static_cast<int>(selected.empty() ? visible_devices(*r.kind, r.node_info).size()
                                           : base::split(selected, ',').size());
}

std::vector<std::string> selected_devices(const Resolution& r, const std::vector<std::string>& visible) {
  const auto& kind = *r.kind;
  const auto& option = selection(r.options, kind);
  auto chosen = base::split(option, ',');
  std::set<std::string> seen;
  for (const auto& id : chosen) {
    if (std::ranges::find(visible, id) == visible.end())
      refuse(kind.option,
             fmt::format("option {} is '{}', but {} '{}' is not among the visible ones ({}; {})", kind.option,
                         option, kind.label, id, fmt::join(visible, ","), visible_source(kind, r.node_info)));
    if (!seen.insert(id).second)
      refuse(kind.option, fmt::format("option {} is '{}', which has {} '{}' twice; name it once, and set "
                                      "oversubscribe to let processes share it",
                                      kind.option, option, kind.label, id));
  }
  const auto count = static_cast<int>(chosen.size());
  if (count != r.spec.nprocs && !(r.options.oversubscribe && count < r.spec.nprocs))
    refuse(kind.option,
           fmt::format("option {} is '{}', {} devices, but nprocs is {}; each process needs one of its own{}",
                       kind.option, option, count, r.spec.nprocs,
                       count < r.spec.nprocs ? ", unless oversubscribe is set" : ""));
  return chosen;
}

}  // namespace

// Reads the variable as the driver does: the list ends before the first id that does not exist.
std::vector<std::string> visible_devices(const DeviceKind& kind, const NodeInfo& node_info) {
  const int count = kind.count(node_info);
  std::vector<std::string> ids;
  const auto list = node_info.environment.find(kind.visible);
  if (kind.visible.empty() || list == node_info.environment.end()) {
    for (int id = 0; id < count; ++id) ids.push_back(std::to_string(id));
    return ids;
  }
  for (auto& id : base::split(list->second, ',')) {
    const auto number = base::parse_number<int>(id);
    if (id.empty() || (number && (*number < 0 || *number >= count)) || count == 0) break;
    ids.push_back(std::move(id));
  }
  return ids;
}

std::string visible_source(const DeviceKind& kind, const NodeInfo& node_info) {
  return node_info.environment.contains(kind.visible)
             ? "environment " + kind.visible
             : fmt::format("default: {} {}s", kind.count(node_info), kind.label);
}

void choose_device(Resolution& r) {
  check_backend_name(r);
  const auto& gpu = device_kind("gpu");
  r.kind = asked_kind(r);
  if (r.kind != nullptr) {
    if (visible_devices(*r.kind, r.node_info).empty()) refuse_absent(r, *r.kind);
    r.from("device", asked_by(r, *r.kind));
  } else if (is_of_cpus(r.options.backend)) {
    r.kind = &device_kind("cpu");
    r.from("device", "backend " + r.options.backend);
    if (const auto idle = visible_devices(gpu, r.node_info); !idle.empty())
      r.warn(fmt::format("backend {} computes on CPUs; the visible GPUs ({}) are not used", r.options.backend,
                         fmt::join(idle, ",")));
  } else if (r.spec.xla.form == WorkerForm::tpu) {
    r.kind = &device_kind("cpu");
    r.from("device", "default");
    r.warn(
        "the TPU form of workers is used, but this build has no driver for TPUs: the processes compute on "
        "CPUs");
  } else {
    const bool has_gpus = !visible_devices(gpu, r.node_info).empty();
    r.kind = has_gpus ? &gpu : &device_kind("cpu");
    r.from("device", has_gpus ? visible_source(gpu, r.node_info) : "default: no GPU is visible");
  }
  r.spec.device = r.kind->name;
}

void choose_nprocs(Resolution& r) {
  auto& spec = r.spec;
  if (r.options.nprocs == -1) {
    spec.nprocs = default_nprocs(r);
  } else {
    spec.nprocs = r.options.nprocs;
    r.from("nprocs", from_option);
  }
  if (spec.xla.devices > 0 && spec.nprocs > spec.xla.devices && !r.options.oversubscribe)
    refuse("nprocs", fmt::format("nprocs is {}, but each node has {} devices ({})", spec.nprocs,
                                 spec.xla.devices, spec.sources.at("configured_devices")));
  if (r.kind->name == "cpu" && spec.nprocs > r.node_info.cores)
    r.warn(fmt::format("{} processes (nprocs) are more than the {} cores: they will wait for each other",
                       spec.nprocs, r.node_info.cores));
}

void choose_backend(Resolution& r) {
  auto& spec = r.spec;
  const auto& asked = r.options.backend;
  if (asked != "auto") {
    if (asked == "serial" && spec.world_size > 1)
      refuse("backend",
             fmt::format("backend serial is for a world of one process, but this one has {} (nprocs is {})",
                         spec.world_size, spec.nprocs));
    if (asked == "shm" && spec.nnodes > 1)
      refuse("backend", fmt::format("backend shm is for processes on one node, but there are {} nodes; use "
                                    "gloo",
                                    spec.nnodes));
    spec.backend = asked;
    r.from("backend", from_option);
  } else if (spec.device == "cpu") {
    spec.backend = spec.nnodes > 1 ? "gloo" : "shm";
    r.from("backend", spec.nnodes > 1 ? fmt::format("default: CPUs of {} nodes", spec.nnodes)
                                      : "default: CPUs of one node");
  } else {
    spec.backend = r.kind->backend;
    r.from("backend", fmt::format("default: {}s", r.kind->label));
  }
}

void choose_visible_devices(Resolution& r) {
  auto& spec = r.spec;
  const auto& kind = *r.kind;
  if (kind.name == "cpu") return r.from("visible_devices", "default: CPUs are not assigned to processes");
  auto devices = visible_devices(kind, r.node_info);
  if (!selection(r.options, kind).empty()) {
    devices = selected_devices(r, devices);
    r.from("visible_devices", "option " + kind.option);
  } else {
    if (spec.nprocs > static_cast<int>(devices.size()) && !r.options.oversubscribe)
      refuse("nprocs", fmt::format("nprocs is {}, but {} {}s are visible ({}; {}); set oversubscribe to let "
                                   "processes share them",
                                   spec.nprocs, devices.size(), kind.label, fmt::join(devices, ","),
                                   visible_source(kind, r.node_info)));
    r.from("visible_devices", visible_source(kind, r.node_info));
  }
  for (int i = 0; i < spec.nprocs; ++i)
    spec.visible_devices.push_back(devices[static_cast<std::size_t>(i) % devices.size()]);
}

}  // namespace accelmgr::launch
