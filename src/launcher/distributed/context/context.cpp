#include "launcher/distributed/context/context.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "accelmgr/distributed_context.hpp"
#include "base/timing.hpp"
#include "launcher/collective/serial.hpp"
#include "launcher/distributed/arrays/device_group.hpp"
#include "launcher/distributed/context/backends.hpp"

namespace accelmgr::distributed {
namespace {

std::uint64_t last_number = 0;

/// The state of this process between calls.
struct Process {
  std::unique_ptr<Context> context = std::make_unique<Context>();
  pid_t pid = getpid();
  bool look_always = false;         ///< sync(temporary).
  std::optional<Environment> left;  ///< Environment of the context that finalize() ended: look() skips it.
  std::optional<int> local_rank;

  void look() {
    if (!environment_has_ranks()) {
      left.reset();
      if (!context->is_serial()) context = std::make_unique<Context>();
      return;
    }
    auto environment = read_environment();
    if (left == environment) return;
    if (!context->is_serial() && *context->environment() == environment) return;
    context = std::make_unique<Context>(request_of(std::move(environment)));
  }
};

// A forked process does not destroy its copy: the destructors would talk to the other ranks for the parent.
struct EndOfProcess {
  void operator()(Process* process) const noexcept {
    if (process->pid == getpid()) delete process;
  }
};

Process& process() {
  static std::unique_ptr<Process, EndOfProcess> here(new Process);
  if (here->pid != getpid()) here.reset(new Process);
  return *here;
}

}  // namespace

JoinRequest request_of(Environment environment) {
  JoinRequest request;
  request.place = place_of(environment);
  // Another launcher does not choose our backend, so it is "auto" then.
  request.backend =
      environment.backend.empty() || environment.backend == "serial" ? auto_backend : environment.backend;
  request.timeout_s = environment.timeout_s.value_or(timing::world_s);
  request.environment = std::move(environment);
  return request;
}

/// A later communicator may have the same address, so `members` tells when this one has ended.
struct Context::OfDevices {
  std::weak_ptr<Communicator> members;
  std::unique_ptr<DeviceGroup> group;
};

Context::Context() : number_(++last_number) {
  joined_.world = collective::make_serial();
  place_ = {
      .rank = 0, .world_size = 1, .local_rank = 0, .local_world_size = 1, .node_rank = 0, .node_count = 1};
}

Context::Context(JoinRequest request)
    : request_(std::move(request)), place_(request_->place), number_(++last_number) {}

Context::~Context() = default;

std::optional<std::string> Context::backend() const {
  if (is_serial()) return std::nullopt;
  if (request_->backend != auto_backend) return request_->backend;
  if (place_.world_size > 1 && is_joined()) return std::string(joined_.world->backend());
  return place_.node_count.value_or(1) == 1 ? "shm" : "gloo";
}

std::string Context::model_name() const {
  if (is_serial()) return "serial";
  return request_->environment.by_accelmgr() ? "accelmgr-dist" : "native-dist";
}

double Context::timeout_s() const noexcept { return request_ ? request_->timeout_s : timing::world_s; }

const Place& Context::whole_place() const {
  if (!place_.is_complete())
    throw UsageError(
        "it is not known which ranks share a node before they have met: call initialize() or a collective "
        "first, or set LOCAL_RANK and LOCAL_WORLD_SIZE");
  return place_;
}

const std::shared_ptr<Communicator>& Context::world() {
  if (!is_joined()) {
    // join() takes the socket, if there is one. A second try after an error binds the port again.
    const auto socket = std::exchange(request_->socket, {}).release();
    joined_ = join({request_->environment, request_->place, request_->backend, request_->init_method,
                    request_->timeout_s, base::UniqueFd(socket)});
    place_ = joined_.place;
  }
  return joined_.world;
}

std::shared_ptr<Communicator> Context::group_of(const std::vector<int>& ranks) {
  if (static_cast<int>(ranks.size()) == world_size()) return world();
  auto& group = groups_[ranks];
  if (!group) group = world()->group(ranks);
  return group;
}

DeviceGroup& Context::device_group(const std::shared_ptr<Communicator>& members,
                                   const std::optional<std::string>& asked) {
  std::erase_if(devices_, [](const auto& one) { return one.members.expired(); });
  for (const auto& [known, group] : devices_)
    if (known.lock() == members) return *group;
  const auto backend = asked ? *asked : request_ ? request_->backend : std::string(auto_backend);
  DeviceGroup::Options options{.cpu_memory_because = "", .timeout_s = timeout_s()};
  if (backend != auto_backend && backend != nccl_backend)
    options.cpu_memory_because = fmt::format("the backend is {}", backend);
  devices_.push_back({members, std::make_unique<DeviceGroup>(*members, std::move(options))});
  return *devices_.back().group;
}

bool Context::share_node(const std::vector<int>& ranks) {
  world();
  const auto node_of = [this](int rank) -> const std::string& {
    return joined_.nodes[static_cast<std::size_t>(rank)];
  };
  return joined_.nodes.empty() || std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
           return node_of(rank) == node_of(ranks.front());
         });
}

Context& current() {
  auto& here = process();
  const auto& context = *here.context;
  // A context of one rank may be replaced: no other rank depends on it, and it may be the rest of a launch
  // that ran in this process.
  if (!context.is_kept() && (context.world_size() == 1 || here.look_always)) here.look();
  return *here.context;
}

std::optional<int> local_rank_hint() { return process().local_rank; }

void set_local_rank(int index) {
  if (index < 0) throw UsageError(fmt::format("the local rank must be 0 or more, not {}", index));
  process().local_rank = index;
}

void sync(bool temporary) {
  auto& here = process();
  here.look_always = temporary;
  here.left.reset();
  if (!here.context->is_kept()) here.look();
}

Context& current_unchanged() { return *process().context; }

void replace_context(std::unique_ptr<Context> context) {
  process().context = std::move(context);
  process().left.reset();
}

void finalize() {
  auto& here = process();
  if (const auto* environment = here.context->environment()) here.left = *environment;
  here.local_rank.reset();
  here.context = std::make_unique<Context>();
}

}  // namespace accelmgr::distributed
