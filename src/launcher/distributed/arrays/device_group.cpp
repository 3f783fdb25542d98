#include "launcher/distributed/arrays/device_group.hpp"

#include <fmt/format.h>

#include <cstring>
#include <exception>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/clock.hpp"
#include "base/cuda/cuda_runtime.hpp"
#include "base/interruption.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "base/waiter.hpp"
#include "launcher/collective/nodes/nodes.hpp"
#include "launcher/collective/signature/argument_checks.hpp"

namespace accelmgr::distributed {
namespace {

std::byte* bytes_at(void* memory) { return static_cast<std::byte*>(memory); }
const std::byte* bytes_at(const void* memory) { return static_cast<const std::byte*>(memory); }

CallOptions on_devices(const Array& array) {
  auto options = options_for(array);
  options.on_devices = true;
  return options;
}

DeviceLibraries& libraries() {
  static DeviceLibraries here{
      .runtime = [] { return device::load_cuda_runtime(device::cuda_runtime_candidates({})); },
      .nccl = [] { return device::load_nccl(device::nccl_candidates({})); }};
  return here;
}

/// What a member says about itself before NCCL is used.
struct Standing {
  std::string hindrance;  ///< Why it cannot use NCCL; empty: it can.
  std::string gpu;        ///< Two members with the same text have the same GPU.
  std::string name;       ///< The GPU's name, for messages.
  NLOHMANN_DEFINE_TYPE_INTRUSIVE(Standing, hindrance, gpu, name)
};

/// "" if each member can use NCCL and has a GPU of its own.
std::string common_hindrance(const std::vector<Standing>& standings, const std::vector<int>& ranks) {
  std::map<std::string, int> owners;
  for (std::size_t i = 0; i < standings.size(); ++i) {
    const auto& [hindrance, gpu, name] = standings[i];
    if (!hindrance.empty()) return fmt::format("rank {}: {}", ranks[i], hindrance);
    if (const auto [owner, first] = owners.emplace(gpu, ranks[i]); !first)
      return fmt::format("ranks {} and {} share one GPU ({}); NCCL needs one for each rank", owner->second,
                         ranks[i], name);
  }
  return "";
}

}  // namespace

DeviceLibraries device_libraries() { return libraries(); }

void use_device_libraries(const std::string& cuda, const std::string& nccl) {
  libraries() = {.runtime = [cuda] { return device::load_cuda_runtime_at(cuda); },
                 .nccl = [nccl] { return device::load_nccl_at(nccl); }};
}

/// Ends a wait for the device when a member has gone: work that needs that member never completes.
class DeviceGroup::Watch final : public base::Waiter {
 public:
  explicit Watch(Communicator& members) : members_(members) {}
  void begin() { gone_.clear(), interrupted_ = false; }
  bool wanted() override {
    if (interrupted_ = interrupted_ || base::interrupted(); interrupted_) return false;
    if (gone_.empty()) {
      gone_ = members_.gone();
      patience_ = base::Deadline::in_seconds(timing::part_of_the_gone_s);
    }
    return gone_.empty() || !patience_.passed();
  }
  const std::vector<int>& gone() const noexcept { return gone_; }
  bool was_interrupted() const noexcept { return interrupted_; }

 private:
  Communicator& members_;
  std::vector<int> gone_;
  base::Deadline patience_ = base::Deadline::in_seconds(0);
  bool interrupted_ = false;
};

struct DeviceGroup::Nccl {
  Nccl(const device::Runtime& runtime, int number, device::Nccl functions)
      : device(runtime, number), event(device.make_event()), table(functions) {}
  device::Device device;
  device::Event event;
  device::Nccl table;
  std::optional<device::DeviceCollectives> collectives;
};

DeviceGroup::DeviceGroup(Communicator& members, Options options)
    : members_(members), options_(std::move(options)), watch_(std::make_unique<Watch>(members)) {}

DeviceGroup::~DeviceGroup() = default;

void DeviceGroup::check_place(const OnDevice& place) const {
  if (device_ && *device_ != place.device)
    throw UsageError(
        fmt::format("the tensor is on device {} of this process, but its collectives are on device {}; move "
                    "the tensor, or make another group",
                    place.device, *device_));
}

bool DeviceGroup::over_nccl(const OnDevice& place) {
  if (broken_)
    throw CollectiveError("an earlier collective on devices has failed: make a new group",
                          CollectiveError::Cause::broken, {});
  if (!established_) establish(place);
  return nccl_ != nullptr;
}

void DeviceGroup::establish(const OnDevice& place) {
  device_ = place.device;
  auto why = what_hinders(place);
  if (why.empty()) why = connect();
  if (!why.empty()) nccl_.reset();
  established_ = true;
  if (members_.rank() != 0) return;
  if (nccl_ != nullptr)
    base::log().info("collectives of tensors on the GPUs of {} ranks go over NCCL", members_.size());
  else if (why == options_.cpu_memory_because)
    base::log().info("collectives of tensors on GPUs go through CPU memory: {}", why);
  else
    base::log().warn("collectives of tensors on GPUs go through CPU memory: {}", why);
}

/// Loads what NCCL needs, and compares the GPUs of all members. Returns the same text on all.
std::string DeviceGroup::what_hinders(const OnDevice& place) {
  Standing mine{.hindrance = options_.cpu_memory_because, .gpu = "", .name = ""};
  if (mine.hindrance.empty()) try {
      nccl_ = std::make_unique<Nccl>(options_.libraries.runtime(), place.device, options_.libraries.nccl());
      mine.name = nccl_->device.pci_bus_id();
      mine.gpu = fmt::format("{} {}", collective::node_key(), mine.name);
    } catch (const Error& error) {
      mine.hindrance = error.what();
    }
  std::vector<Standing> all;
  for (const auto& text : members_.all_gather_objects(nlohmann::json(mine).dump()))
    all.push_back(nlohmann::json::parse(text).get<Standing>());
  if (!options_.cpu_memory_because.empty() && all.front().hindrance == options_.cpu_memory_because)
    return options_.cpu_memory_because;
  return common_hindrance(all, members_.ranks());
}

/// Makes NCCL's communicator. Returns why it could not be made, the same text on all members.
std::string DeviceGroup::connect() {
  // The first byte says whether the id was made.
  std::string id;
  if (members_.rank() == 0) try {
      const auto made = device::DeviceCollectives::make_id(nccl_->table);
      id = "+" + std::string(made.bytes, sizeof made.bytes);
    } catch (const device::DeviceError& error) {
      id = std::string("-") + error.what();
    }
  id = members_.broadcast_object(id, 0);
  if (id.front() != '+') return id.substr(1);
  device::NcclId unpacked{};
  std::memcpy(unpacked.bytes, id.data() + 1, std::min(id.size() - 1, sizeof unpacked.bytes));

  std::string failure;
  watch_->begin();
  try {
    nccl_->collectives.emplace(nccl_->device, nccl_->table, unpacked, members_.rank(), members_.size(),
                               *watch_, options_.timeout_s);
    if (!nccl_->collectives->connect()) failure = "a rank was lost while NCCL connected them";
  } catch (const device::DeviceError& error) {
    failure = error.what();
  }
  // A member that fails at once waits here for the others, which wait for it above.
  const auto failures = members_.all_gather_objects(failure, {.timeout_s = 2 * options_.timeout_s});
  for (std::size_t i = 0; i < failures.size(); ++i)
    if (!failures[i].empty()) return fmt::format("rank {}: {}", members_.ranks()[i], failures[i]);
  return "";
}

bool DeviceGroup::reduces(DType dtype, ReduceOp op) {
  if (device::DeviceCollectives::reduces(dtype, op)) return true;
  if (told_.emplace(dtype, op).second && members_.rank() == 0)
    base::log().warn("{} of {} on GPUs goes through CPU memory: NCCL does not have it", name_of(op),
                     name_of(dtype));
  return false;
}

bool DeviceGroup::run(const char* call, const Array& array, const OnDevice& place, const Queue& queue) {
  if (array.count() == 0) return true;
  watch_->begin();
  auto& nccl = *nccl_;
  const auto named = [&] { return fmt::format("{} on {} devices", call, members_.size()); };
  try {
    if (queue(*nccl.collectives)) {
      nccl.device.record(nccl.event, place.stream);
      if (nccl.collectives->wait(nccl.event)) return true;
    }
  } catch (const device::DeviceError& error) {
    broken_ = true;
    if (error.code() == device::nccl_code::in_progress)
      throw CollectiveError(fmt::format("{}: {}", named(), error.what()), CollectiveError::Cause::timeout,
                            members_.gone());
    if (const auto gone = members_.gone(); !gone.empty())
      throw CollectiveError(
          fmt::format("{}: {} ended in the middle ({})", named(), collective::names_of(gone), error.what()),
          CollectiveError::Cause::lost, gone);
    throw;
  }
  broken_ = true;
  if (watch_->was_interrupted())
    throw CollectiveError(fmt::format("{} was interrupted", named()), CollectiveError::Cause::timeout, {});
  throw CollectiveError(
      fmt::format("{}: {} ended in the middle", named(), collective::names_of(watch_->gone())),
      CollectiveError::Cause::lost, watch_->gone());
}

bool DeviceGroup::all_reduce(const Array& in, void* out, ReduceOp op, const OnDevice& place) {
  check_place(place);
  members_.all_reduce(nullptr, nullptr, 0, in.dtype, op, on_devices(in));
  if (!over_nccl(place) || !reduces(in.dtype, op)) return false;
  return run("all_reduce", in, place, [&](auto& collectives) {
    return collectives.all_reduce(bytes_at(in.data), bytes_at(out), in.count(), in.dtype, op, place.stream);
  });
}

bool DeviceGroup::all_gather(const Array& in, void* out, const OnDevice& place) {
  check_place(place);
  members_.all_gather(nullptr, nullptr, 0, in.dtype, on_devices(in));
  if (!over_nccl(place)) return false;
  return run("all_gather", in, place, [&](auto& collectives) {
    return collectives.all_gather(bytes_at(in.data), bytes_at(out), in.count() * size_of(in.dtype),
                                  place.stream);
  });
}

bool DeviceGroup::broadcast(const Array& like, void* data, int src, const OnDevice& place) {
  check_place(place);
  members_.broadcast(nullptr, 0, like.dtype, src, on_devices(like));
  if (!over_nccl(place)) return false;
  return run("broadcast", like, place, [&](auto& collectives) {
    return collectives.broadcast(bytes_at(data), like.count() * size_of(like.dtype), src, place.stream);
  });
}

bool DeviceGroup::reduce_scatter(const Array& in, void* out, ReduceOp op, const OnDevice& place) {
  check_place(place);
  const Blocks blocks(in, members_.size());
  members_.reduce_scatter(nullptr, nullptr, 0, in.dtype, op, on_devices(in));
  blocks.check(in, "reduce_scatter");
  if (!over_nccl(place) || !reduces(in.dtype, op)) return false;
  return run("reduce_scatter", in, place, [&](auto& collectives) {
    return collectives.reduce_scatter(bytes_at(in.data), bytes_at(out), blocks.count(), in.dtype, op,
                                      place.stream);
  });
}

bool DeviceGroup::all_to_all(const Array& in, void* out, const OnDevice& place) {
  check_place(place);
  const Blocks blocks(in, members_.size());
  members_.all_to_all(nullptr, nullptr, 0, in.dtype, on_devices(in));
  blocks.check(in, "all_to_all");
  if (!over_nccl(place)) return false;
  return run("all_to_all", in, place, [&](auto& collectives) {
    return collectives.all_to_all(bytes_at(in.data), bytes_at(out), blocks.count() * size_of(in.dtype),
                                  place.stream);
  });
}

}  // namespace accelmgr::distributed
