#include "engine/support/fake_nccl.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace accelmgr::test {

using device::CommunicatorHandle;
using device::NcclCode;
using device::NcclOperation;
using device::NcclType;
using device::StreamHandle;
using fake_nccl::Kind;
using fake_nccl::Message;
using fake_nccl::Operation;
using fake_nccl::Share;
using fake_nccl::Signature;
using fake_nccl::Team;
namespace nccl_code = device::nccl_code;

namespace {

FakeNccl* the_nccl = nullptr;
constexpr std::uint64_t most_polls = 3;  // Until a call that returned early is done.

}  // namespace

struct FakeNccl::Communicator {
  std::shared_ptr<Team> team;
  int rank = 0;
  bool gone = false, connected = false, finalized = false;
  std::uint64_t polls = 0;               ///< Until the last call is done.
  std::uint64_t next = 0;                ///< The number of its next operation.
  StreamHandle stream = nullptr;         ///< Where `pending` is to go.
  std::shared_ptr<Operation> pending{};  ///< Not on its stream yet.

  void launch() {
    if (!pending) return;
    const auto queued = [operation = std::exchange(pending, nullptr)] { return operation->progress(); };
    FakeCuda::of_process().launch_polled(stream, queued);
  }
};

/// The functions of the table.
struct FakeNcclFunctions {
  /// The group of a thread.
  struct Group {
    int depth = 0;
    CommunicatorHandle communicator = nullptr;
    StreamHandle stream = nullptr;
    Share share;
    NcclCode failed = nccl_code::success;
  };
  static Group& group() {
    thread_local Group group;
    return group;
  }

  static NcclCode get_version(int* version) {
    *version = 22809;
    return the_nccl->enter("ncclGetVersion");
  }

  static NcclCode get_unique_id(device::NcclId* id) {
    if (const auto failed = the_nccl->enter("ncclGetUniqueId")) return failed;
    const std::lock_guard lock(the_nccl->mutex_);
    the_nccl->ids_.push_back(Team::make(*id, the_nccl->random_()));
    return nccl_code::success;
  }

  static NcclCode init_rank(CommunicatorHandle* handle, int size, device::NcclId id, int rank,
                            device::NcclConfig* config) {
    if (const auto failed = the_nccl->enter("ncclCommInitRankConfig")) return failed;
    return the_nccl->init(handle, size, id, rank, *config);
  }

  static NcclCode async_error(CommunicatorHandle handle, NcclCode* error) {
    if (const auto failed = the_nccl->enter("ncclCommGetAsyncError")) return failed;
    const std::lock_guard lock(the_nccl->mutex_);
    auto& communicator = the_nccl->state_of(handle);
    if (communicator.gone) {
      the_nccl->misuse("ncclCommGetAsyncError", "the communicator is gone");
      return nccl_code::invalid_argument;
    }
    const bool busy = the_nccl->in_progress(communicator);
    *error = the_nccl->error_of(communicator);
    if (*error == nccl_code::success && busy) *error = nccl_code::in_progress;
    return nccl_code::success;
  }

  static NcclCode abort(CommunicatorHandle handle) { return the_nccl->end("ncclCommAbort", handle); }
  static NcclCode destroy(CommunicatorHandle handle) { return the_nccl->end("ncclCommDestroy", handle); }

  static NcclCode finalize(CommunicatorHandle handle) {
    if (const auto failed = the_nccl->enter("ncclCommFinalize")) return failed;
    const std::lock_guard lock(the_nccl->mutex_);
    auto& communicator = the_nccl->state_of(handle);
    if (!the_nccl->usable("ncclCommFinalize", communicator)) return nccl_code::invalid_argument;
    communicator.finalized = true;
    communicator.polls = the_nccl->random_() % (most_polls + 1);
    return communicator.polls > 0 ? nccl_code::in_progress : nccl_code::success;
  }

  static NcclCode issue(const char* function, CommunicatorHandle handle, StreamHandle stream,
                        const Signature& signature, Share share) {
    if (const auto failed = the_nccl->enter(function)) return failed;
    const std::lock_guard lock(the_nccl->mutex_);
    return the_nccl->issue(function, the_nccl->state_of(handle), stream, signature, std::move(share));
  }
  static const std::byte* bytes(const void* memory) { return static_cast<const std::byte*>(memory); }
  static std::byte* bytes(void* memory) { return static_cast<std::byte*>(memory); }

  static NcclCode all_reduce(const void* from, void* to, std::size_t count, NcclType type,
                             NcclOperation operation, CommunicatorHandle handle, StreamHandle stream) {
    return issue("ncclAllReduce", handle, stream, {Kind::all_reduce, count, type, operation},
                 {bytes(from), bytes(to)});
  }
  static NcclCode reduce_scatter(const void* from, void* to, std::size_t count, NcclType type,
                                 NcclOperation operation, CommunicatorHandle handle, StreamHandle stream) {
    return issue("ncclReduceScatter", handle, stream, {Kind::reduce_scatter, count, type, operation},
                 {bytes(from), bytes(to)});
  }
  static NcclCode all_gather(const void* from, void* to, std::size_t count, NcclType type,
                             CommunicatorHandle handle, StreamHandle stream) {
    return issue("ncclAllGather", handle, stream, {Kind::all_gather, count, type}, {bytes(from), bytes(to)});
  }
  static NcclCode broadcast(const void* from, void* to, std::size_t count, NcclType type, int root,
                            CommunicatorHandle handle, StreamHandle stream) {
    return issue("ncclBroadcast", handle, stream, {Kind::broadcast, count, type, NcclOperation::sum, root},
                 {bytes(from), bytes(to)});
  }

  static NcclCode add(const char* function, CommunicatorHandle handle, StreamHandle stream,
                      std::vector<Message>& messages, Message message) {
    auto& open = group();
    if (const auto failed = the_nccl->enter(function)) return open.failed = failed;
    if (open.depth == 0 || (open.communicator != nullptr && open.communicator != handle))
      throw std::logic_error("the fake has messages in groups of one communicator only");
    open.communicator = handle;
    open.stream = stream;
    messages.push_back(message);
    return nccl_code::success;
  }
  static NcclCode send(const void* from, std::size_t count, NcclType type, int peer,
                       CommunicatorHandle handle, StreamHandle stream) {
    return add("ncclSend", handle, stream, group().share.sends,
               {peer, {const_cast<std::byte*>(bytes(from)), Signature{Kind::exchange, count, type}.bytes()}});
  }
  static NcclCode receive(void* to, std::size_t count, NcclType type, int peer, CommunicatorHandle handle,
                          StreamHandle stream) {
    return add("ncclRecv", handle, stream, group().share.receives,
               {peer, {bytes(to), Signature{Kind::exchange, count, type}.bytes()}});
  }

  static NcclCode group_start() {
    if (const auto failed = the_nccl->enter("ncclGroupStart")) return failed;
    ++group().depth;
    return nccl_code::success;
  }
  // A group in which a call failed does nothing.
  static NcclCode group_end() {
    auto open = std::exchange(group(), {});
    if (const auto failed = the_nccl->enter("ncclGroupEnd")) return failed;
    if (open.failed != nccl_code::success || open.communicator == nullptr) return open.failed;
    const std::lock_guard lock(the_nccl->mutex_);
    const auto size = open.share.sends.empty() ? 0 : open.share.sends[0].memory.size();
    return the_nccl->issue("ncclGroupEnd", the_nccl->state_of(open.communicator), open.stream,
                           {Kind::exchange, size}, std::move(open.share));
  }

  static const char* error_text(NcclCode code) {
    switch (code) {
      case nccl_code::remote_error:
        return "remote process exited or there was a network error";
      case nccl_code::system_error:
        return "unhandled system error";
      default:
        return "an error of the fake";
    }
  }
  static const char* last_error(CommunicatorHandle) { return "what the fake knows"; }
};

FakeNccl::FakeNccl(std::uint64_t seed, FirstOperation first) : first_(first), random_(seed) {
  if (the_nccl != nullptr) throw std::logic_error("there is a FakeNccl already");
  the_nccl = this;
}

FakeNccl::~FakeNccl() {
  release();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return hanging_ == 0; });
  the_nccl = nullptr;
}

FakeNccl& FakeNccl::of_process() {
  if (the_nccl == nullptr) (new FakeNccl)->ends_process_ = true;
  return *the_nccl;
}

device::Nccl FakeNccl::table() {
  return {.get_version = FakeNcclFunctions::get_version,
          .get_unique_id = FakeNcclFunctions::get_unique_id,
          .init_rank = FakeNcclFunctions::init_rank,
          .async_error = FakeNcclFunctions::async_error,
          .abort = FakeNcclFunctions::abort,
          .finalize = FakeNcclFunctions::finalize,
          .destroy = FakeNcclFunctions::destroy,
          .all_reduce = FakeNcclFunctions::all_reduce,
          .reduce_scatter = FakeNcclFunctions::reduce_scatter,
          .all_gather = FakeNcclFunctions::all_gather,
          .broadcast = FakeNcclFunctions::broadcast,
          .send = FakeNcclFunctions::send,
          .receive = FakeNcclFunctions::receive,
          .group_start = FakeNcclFunctions::group_start,
          .group_end = FakeNcclFunctions::group_end,
          .error_text = FakeNcclFunctions::error_text,
          .last_error = FakeNcclFunctions::last_error};
}

/// Counts the call. Returns the error that it is to report.
NcclCode FakeNccl::enter(const char* function) {
  std::unique_lock lock(mutex_);
  const auto failed = count(function);
  if (hangs_[function]) {
    ++hanging_;
    changed_.wait(lock, [&] { return released_; });
    --hanging_;
    changed_.notify_all();
    return nccl_code::internal_error;
  }
  return failed;
}

FakeNccl::Communicator& FakeNccl::state_of(CommunicatorHandle handle) {
  return *reinterpret_cast<Communicator*>(handle);
}

void FakeNccl::misuse(const char* function, const char* what) {
  note(misuses_, std::string(function) + ": " + what);
}

void FakeNccl::note(std::vector<std::string>& list, const std::string& text) const {
  list.push_back(text);
  if (!ends_process_) return;
  std::fprintf(stderr, "the fake of NCCL: %s\n", text.c_str());
  std::abort();
}

bool FakeNccl::usable(const char* function, Communicator& communicator) {
  if (communicator.gone)
    misuse(function, "the communicator is gone");
  else if (communicator.finalized)
    misuse(function, "the communicator is finalized");
  else if (!communicator.connected || communicator.polls > 0)
    misuse(function, "the last call is not done");
  else
    return true;
  return false;
}

NcclCode FakeNccl::init(CommunicatorHandle* handle, int size, const device::NcclId& id, int rank,
                        const device::NcclConfig& config) {
  const std::lock_guard lock(mutex_);
  if (config.magic != 0xcafebeef || config.size != sizeof config || config.blocking != 0) {
    misuse("ncclCommInitRankConfig", "the configuration is not as it should be");
    return nccl_code::invalid_argument;
  }
  auto& known = teams_[std::string(id.bytes, sizeof id.bytes)];
  auto team = known.lock();
  if (team == nullptr) known = team = Team::open(id, size);
  if (team == nullptr) return nccl_code::system_error;
  if (!team->join(rank, size)) {
    misuse("ncclCommInitRankConfig", "the rank is there already, or has another size");
    return nccl_code::invalid_usage;
  }
  auto& communicator = *communicators_.emplace_back(std::make_unique<Communicator>());
  communicator.team = std::move(team);
  communicator.rank = rank;
  communicator.polls = random_() % (most_polls + 1);
  *handle = reinterpret_cast<CommunicatorHandle>(&communicator);
  return nccl_code::in_progress;
}

/// A poll. What is not on its stream yet goes there with the last one.
bool FakeNccl::in_progress(Communicator& communicator) {
  const auto& team = *communicator.team;
  if (!communicator.connected && !team.all_have_joined()) return true;
  if (communicator.polls > 0) --communicator.polls;
  const bool asks_all =
      first_ == FirstOperation::when_asked && communicator.next == 1 && communicator.pending;
  if (communicator.polls > 0 || (asks_all && !team.all_have_issued())) {
    communicator.polls = std::max<std::uint64_t>(communicator.polls, 1);
    return true;
  }
  communicator.connected = true;
  communicator.launch();
  return false;
}

NcclCode FakeNccl::issue(const char* function, Communicator& communicator, StreamHandle stream,
                         const Signature& signature, Share share) {
  if (!usable(function, communicator)) return nccl_code::invalid_argument;
  const auto number = communicator.next++;
  const bool agrees = communicator.team->issue(communicator.rank, number, signature);
  if (!agrees) note(mismatches_, std::string(function) + " of rank " + std::to_string(communicator.rank));
  const auto operation =
      std::make_shared<Operation>(communicator.team, communicator.rank, number, signature, std::move(share));
  if (!operation->fits()) {
    misuse(function, "the fake has no room for so many bytes");
    return nccl_code::invalid_argument;
  }
  for (const auto& memory : operation->written())
    if (!memory.empty() && !FakeCuda::of_process().is_device_memory(memory.data(), memory.size()))
      misuse(function, "this is no memory of the device");
  communicator.stream = stream;
  communicator.pending = operation;
  communicator.polls = random_() % (most_polls + 1);
  if (first_ == FirstOperation::when_asked && number == 0) communicator.polls = 1;
  if (communicator.polls > 0) return nccl_code::in_progress;
  communicator.launch();
  return nccl_code::success;
}

/// What a poll reports, other than that the last call is under way.
NcclCode FakeNccl::error_of(const Communicator& communicator) const {
  if (const auto fault = asynchronous_.find(communicator.rank); fault != asynchronous_.end())
    return fault->second;
  const auto& team = *communicator.team;
  if (team.disagrees()) return nccl_code::invalid_usage;
  for (int rank = 0; tells_ && rank < team.size(); ++rank)
    if (team.has_aborted(rank)) return nccl_code::remote_error;
  return nccl_code::success;
}

/// Abort and destroy.
NcclCode FakeNccl::end(const char* function, CommunicatorHandle handle) {
  if (const auto failed = enter(function)) return failed;
  const std::lock_guard lock(mutex_);
  auto& communicator = state_of(handle);
  if (std::exchange(communicator.gone, true)) {
    misuse(function, "the communicator is gone");
    return nccl_code::invalid_argument;
  }
  const bool aborts = function == std::string("ncclCommAbort");
  if (!aborts && (!communicator.finalized || communicator.polls > 0))
    misuse(function, "the communicator is not finalized");
  if (aborts) communicator.team->abort(communicator.rank);
  communicator.team.reset();  // Operations that are queued still have it.
  return nccl_code::success;
}

void FakeNccl::release() {
  const std::lock_guard lock(mutex_);
  released_ = true;
  changed_.notify_all();
}

int FakeNccl::live() {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(
      std::ranges::count(communicators_, false, [](const auto& one) { return one->gone; }));
}

}  // namespace accelmgr::test
