#include "distributed/context.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "accelmgr/distributed.hpp"
#include "collective/serial.hpp"
#include "distributed/backends.hpp"

namespace accelmgr::distributed {
namespace {

std::uint64_t last_number = 0;

/// All that this process keeps between calls.
struct Process {
  std::unique_ptr<Context> context = std::make_unique<Context>();
  pid_t pid = getpid();
  bool look_always = false;         ///< sync(temporary).
  std::optional<Environment> left;  ///< Of the context that finalize() ended: not to be found again.
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

// A fork's copy is left alone: its destructors would speak to the others in the parent's name.
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
  // Whoever launches does not choose for others' programs.
  request.backend =
      environment.backend.empty() || environment.backend == "serial" ? auto_backend : environment.backend;
  request.timeout_s = environment.timeout_s.value_or(default_timeout_s);
  request.environment = std::move(environment);
  return request;
}

Context::Context() : number_(++last_number) {
  joined_.world = collective::make_serial();
  place_ = {
      .rank = 0, .world_size = 1, .local_rank = 0, .local_world_size = 1, .node_rank = 0, .node_count = 1};
}

Context::Context(JoinRequest request)
    : request_(std::move(request)), place_(request_->place), number_(++last_number) {}

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

double Context::timeout_s() const noexcept { return request_ ? request_->timeout_s : default_timeout_s; }

const Place& Context::whole_place() const {
  if (!place_.is_complete())
    throw UsageError(
        "which ranks share a host is not known before they have met: call initialize() or a collective "
        "first, or "
        "set LOCAL_RANK and LOCAL_WORLD_SIZE");
  return place_;
}

const std::shared_ptr<Communicator>& Context::world() {
  if (!is_joined()) {
    // The socket, if there is one, is handed over: who tries again binds anew.
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

bool Context::share_host(const std::vector<int>& ranks) {
  world();
  const auto host_of = [this](int rank) -> const std::string& {
    return joined_.hosts[static_cast<std::size_t>(rank)];
  };
  return joined_.hosts.empty() || std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
           return host_of(rank) == host_of(ranks.front());
         });
}

Context& current() {
  auto& here = process();
  const auto& context = *here.context;
  // Alone, there is nobody whom it could keep waiting; and a launch that ran here has left it behind.
  if (!context.is_kept() && (context.world_size() == 1 || here.look_always)) here.look();
  return *here.context;
}

std::optional<int> local_rank_hint() { return process().local_rank; }

void set_local_rank(int index) {
  if (index < 0) throw UsageError(fmt::format("a local rank is 0 or more, not {}", index));
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
