#include "engine/device/assignment.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <stdlib.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/config/device_name.hpp"
#include "base/config/loader.hpp"
#include "base/parse_number.hpp"
#include "engine/device/slices.hpp"

namespace accelmgr::device {
namespace {

using config::on_cpu;

constexpr const char* device_key = "runners.device";
constexpr const char* devices_key = "runners.devices";

/// The device of a rank: an index into the visible GPUs; nullopt: the CPU.
using Chosen = std::optional<std::size_t>;

std::vector<std::string> described(const Gpus& gpus) {
  std::vector<std::string> all;
  for (std::size_t i = 0; i < gpus.visible.size(); ++i) all.push_back(describe(gpus, i));
  return all;
}

std::size_t gpu_named(const std::string& text, const Gpus& gpus) {
  const auto& visible = gpus.visible;
  std::vector<std::size_t> meant;
  const auto number = base::parse_number<std::size_t>(text);
  const bool is_uuid = begins(text, "GPU-") || begins(text, "MIG-");
  for (std::size_t i = 0; i < visible.size(); ++i)
    if (i == number || (is_uuid && begins(visible[i].uuid, text))) meant.push_back(i);
  if (meant.size() == 1) return meant.front();
  for (const auto& gpu : gpus.sliced)
    if (meant.empty() && is_uuid && begins(gpu.whole.uuid, text))
      throw ConfigError(fmt::format("{} names '{}', which is {}", devices_key, text, why_not_whole(gpu)),
                        devices_key);
  throw ConfigError(
      fmt::format("{} names '{}', which is {}; there are {}", devices_key, text,
                  meant.empty() ? "none of the visible GPUs, nor cpu" : "the beginning of several UUIDs",
                  fmt::join(described(gpus), ", ")),
      devices_key);
}

/// "GPU 0 (...) by process 4711".
std::string taken(const Gpus& gpus, std::size_t index) {
  return fmt::format("{} by {}", describe(gpus, index), gpus.visible[index].taken_by);
}

/// The GPUs that no other session computes on. Throws if there is none.
std::vector<Chosen> free_gpus(const Config& config, const Gpus& gpus) {
  std::vector<Chosen> free;
  std::vector<std::string> others;
  for (std::size_t i = 0; i < gpus.visible.size(); ++i) {
    if (gpus.visible[i].taken_by.empty() || config.runners.oversubscribe)
      free.emplace_back(i);
    else
      others.push_back(taken(gpus, i));
  }
  if (free.empty())
    throw ConfigError(
        fmt::format("{} is {}, but other sessions have all GPUs ({}); set runners.oversubscribe to "
                    "share them, or {} to cpu",
                    device_key, config::name_of(config.runners.device), fmt::join(others, ", "), device_key),
        device_key);
  return free;
}

/// The devices that the configuration names, or else all GPUs that are free.
std::vector<Chosen> chosen_devices(const Config& config, const Gpus& gpus) {
  std::vector<Chosen> chosen;
  for (const auto& text : config.runners.devices)
    chosen.push_back(text == on_cpu ? Chosen() : gpu_named(text, gpus));
  if (chosen.empty()) return free_gpus(config, gpus);
  if (config.runners.oversubscribe) return chosen;
  for (auto one = chosen.begin(); one != chosen.end(); ++one) {
    if (!*one) continue;
    if (std::find(chosen.begin(), one, *one) != one)
      throw ConfigError(fmt::format("{} names {} twice; set runners.oversubscribe to let runners share it",
                                    devices_key, describe(gpus, **one)),
                        devices_key);
    if (!gpus.visible[**one].taken_by.empty())
      throw ConfigError(
          fmt::format("{} names a GPU that another session has: {}; set runners.oversubscribe to share it",
                      devices_key, taken(gpus, **one)),
          devices_key);
  }
  return chosen;
}

/// Throws unless there is a device for each of `ranks`, which `key` asks for.
void check_count(const Config& config, int ranks, const char* key, std::size_t devices) {
  if (std::cmp_less_equal(ranks, devices) || config.runners.oversubscribe) return;
  const auto there =
      config.runners.devices.empty()
          ? fmt::format("{} free", devices == 1 ? "1 GPU is" : fmt::format("{} GPUs are", devices))
          : fmt::format("{} has {} devices", devices_key, devices);
  throw ConfigError(
      fmt::format("{} is {}, but {}; set runners.oversubscribe to let runners share them", key, ranks, there),
      key);
}

Assignment on_the_cpu(Config config, int cores, std::string why) {
  auto& runners = config.runners;
  const auto listed = static_cast<int>(runners.devices.size());
  if (config.nprocs == one_per_device) config.nprocs = listed > 0 ? listed : Config{}.nprocs;
  runners.device = Device::cpu;
  runners.devices.clear();
  std::vector<std::string> ranks(static_cast<std::size_t>(config.nprocs),
                                 fmt::format("the CPU ({} cores)", cores));
  return {std::move(config), std::move(ranks), std::move(why)};
}

Assignment on_tpu_chips(Config config, int chips) {
  if (config.nprocs == one_per_device) config.nprocs = chips;
  if (config.nprocs > chips)
    throw ConfigError(fmt::format("nprocs is {}, but this machine has {} TPU chips", config.nprocs, chips),
                      "nprocs");
  config.runners.device = Device::xla;
  Assignment assignment{std::move(config), {}, {}};
  for (int rank = 0; rank < assignment.config.nprocs; ++rank)
    assignment.ranks.push_back(fmt::format("TPU chip {}", rank));
  return assignment;
}

/// Devices are not counted. Without a TPU, torch_xla's device is the CPU unless PJRT_DEVICE says otherwise,
/// and any number of runners can have one. Only torch knows accelerators, in the runners.
Assignment uncounted(Config config, const char* each) {
  if (config.nprocs == one_per_device) config.nprocs = Config{}.nprocs;
  std::vector<std::string> ranks(static_cast<std::size_t>(config.nprocs), each);
  return {std::move(config), std::move(ranks), {}};
}

Assignment on_gpus(Config config, const Machine& machine) {
  const auto chosen = chosen_devices(config, machine.gpus);
  if (std::ranges::none_of(chosen, [](const Chosen& one) { return one.has_value(); }))
    return on_the_cpu(std::move(config), machine.cores, {});
  if (config.nprocs == one_per_device) config.nprocs = static_cast<int>(chosen.size());
  check_count(config, config.nprocs, "nprocs", chosen.size());
  check_count(config, config.runners.max_runners, "runners.max_runners", chosen.size());
  const auto most = static_cast<std::size_t>(std::max(config.nprocs, config.runners.max_runners));
  Assignment assignment{std::move(config), {}, {}};
  auto& runners = assignment.config.runners;
  runners.device = Device::cuda;
  runners.devices.clear();
  for (std::size_t rank = 0; rank < most; ++rank) {
    const auto& device = chosen[rank % chosen.size()];
    runners.devices.push_back(device ? machine.gpus.visible[*device].uuid : on_cpu);
    if (std::cmp_less(rank, assignment.config.nprocs))
      assignment.ranks.push_back(device ? describe(machine.gpus, *device)
                                        : fmt::format("the CPU ({} cores)", machine.cores));
  }
  return assignment;
}

Assignment assign(const Config& config, const Machine& machine) {
  const auto& [device, devices, oversubscribe] =
      std::tie(config.runners.device, config.runners.devices, config.runners.oversubscribe);
  if (device == Device::xla)
    return machine.tpu_chips > 0 ? on_tpu_chips(config, machine.tpu_chips)
                                 : uncounted(config, "a device of torch_xla, which has no TPU chips here");
  if (device == Device::accelerator) return uncounted(config, "a device of torch.accelerator");
  const bool names_gpus = std::ranges::any_of(devices, [](const auto& text) { return text != on_cpu; });
  if (!machine.gpus.visible.empty() || (!devices.empty() && !names_gpus)) return on_gpus(config, machine);
  const auto& why = machine.gpus.why_none;
  if (names_gpus)
    throw ConfigError(
        fmt::format("{} is [{}], but no GPU can be used: {}", devices_key, fmt::join(devices, ", "), why),
        devices_key);
  if (device == Device::cuda)
    throw ConfigError(fmt::format("{} is cuda, but no GPU can be used: {}", device_key, why), device_key);
  if (machine.tpu_chips > 0 && config.model.kind == "python") return on_tpu_chips(config, machine.tpu_chips);
  return on_the_cpu(config, machine.cores, why);
}

}  // namespace

bool leaves_devices_open(const Config& config) {
  const auto device = config.runners.device;
  return device == Device::automatic || device == Device::cuda || config.nprocs == one_per_device;
}

Assignment assign_devices(const Config& config, const Machine& machine) {
  config::validate(config);
  auto assignment = assign(config, machine);
  config::validate(assignment.config);
  return assignment;
}

std::string why_in_no_team(const Config& assigned, int rank) {
  const auto& devices = assigned.runners.devices;
  const auto& own = devices.empty() ? on_cpu : devices.at(static_cast<std::size_t>(rank));
  if (own == on_cpu) return "it has no GPU";
  if (assigned.runners.nccl == NcclUse::off) return "runners.nccl is off";
  if (begins(own, "MIG-")) return "its GPU is a MIG slice, and NCCL does not connect MIG slices";
  const auto ranks_on = [&](const std::string& device) { return std::ranges::count(devices, device); };
  if (ranks_on(own) > 1) return "it shares its GPU with other ranks";
  const auto alone =
      std::ranges::count_if(devices, [&](const auto& one) { return one != on_cpu && ranks_on(one) == 1; });
  return alone < 2 ? "no other rank has a GPU of its own" : "";
}

}  // namespace accelmgr::device
