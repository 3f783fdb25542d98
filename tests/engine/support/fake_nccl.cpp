#include "engine/support/fake_nccl.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "half_precision.hpp"

namespace accelmgr::test {

using device::CommunicatorHandle;
using device::NcclCode;
using device::NcclOperation;
using device::NcclType;
using device::StreamHandle;
namespace nccl_code = device::nccl_code;

namespace {

FakeNccl* the_nccl = nullptr;
constexpr std::uint64_t most_polls = 3;  // Until a call that returned early is done.
constexpr std::byte any_value{0xff};

enum class Kind { all_reduce, reduce_scatter, all_gather, broadcast, exchange };

std::size_t bytes_of(NcclType type) {
  switch (type) {
    case NcclType::int8:
    case NcclType::uint8:
      return 1;
    case NcclType::float16:
    case NcclType::bfloat16:
      return 2;
    case NcclType::int64:
    case NcclType::uint64:
    case NcclType::float64:
      return 8;
    default:
      return 4;
  }
}

template <class T>
T combined(T a, T b, NcclOperation operation) {
  switch (operation) {
    case NcclOperation::product:
      return static_cast<T>(a * b);
    case NcclOperation::maximum:
      return std::max(a, b);
    case NcclOperation::minimum:
      return std::min(a, b);
    default:
      return static_cast<T>(a + b);
  }
}

template <class T>
std::vector<std::byte> reduced_as(const std::vector<const std::byte*>& ranks, std::size_t count,
                                  NcclOperation operation) {
  std::vector<std::byte> result(count * sizeof(T));
  for (std::size_t i = 0; i < count; ++i) {
    T sum{}, value;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      std::memcpy(&value, ranks[r] + i * sizeof(T), sizeof(T));
      sum = r == 0 ? value : combined(sum, value, operation);
    }
    if (operation == NcclOperation::mean) sum = static_cast<T>(sum / static_cast<T>(ranks.size()));
    std::memcpy(result.data() + i * sizeof(T), &sum, sizeof(T));
  }
  return result;
}

/// Numbers of 16 bits: in float32, rounded once.
template <class Half>
std::vector<std::byte> reduced_in_float32(const std::vector<const std::byte*>& ranks, std::size_t count,
                                          NcclOperation operation) {
  std::vector<std::vector<float>> wide;
  std::vector<const std::byte*> memory;
  for (const auto* rank : ranks) {
    wide.emplace_back(count);
    for (std::size_t i = 0; i < count; ++i) {
      Half value;
      std::memcpy(&value, rank + i * sizeof value, sizeof value);
      wide.back()[i] = from_half(value);
    }
    memory.push_back(reinterpret_cast<const std::byte*>(wide.back().data()));
  }
  const auto sums = reduced_as<float>(memory, count, operation);
  std::vector<std::byte> result(count * sizeof(Half));
  for (std::size_t i = 0; i < count; ++i) {
    float sum;
    std::memcpy(&sum, sums.data() + i * sizeof sum, sizeof sum);
    const auto rounded = to_half<Half>(sum);
    std::memcpy(result.data() + i * sizeof rounded, &rounded, sizeof rounded);
  }
  return result;
}

std::vector<std::byte> reduced(const std::vector<const std::byte*>& ranks, std::size_t count, NcclType type,
                               NcclOperation operation) {
  switch (type) {
    case NcclType::int8:
      return reduced_as<std::int8_t>(ranks, count, operation);
    case NcclType::uint8:
      return reduced_as<std::uint8_t>(ranks, count, operation);
    case NcclType::int32:
      return reduced_as<std::int32_t>(ranks, count, operation);
    case NcclType::uint32:
      return reduced_as<std::uint32_t>(ranks, count, operation);
    case NcclType::int64:
      return reduced_as<std::int64_t>(ranks, count, operation);
    case NcclType::uint64:
      return reduced_as<std::uint64_t>(ranks, count, operation);
    case NcclType::float32:
      return reduced_as<float>(ranks, count, operation);
    case NcclType::float64:
      return reduced_as<double>(ranks, count, operation);
    case NcclType::float16:
      return reduced_in_float32<Float16>(ranks, count, operation);
    case NcclType::bfloat16:
      return reduced_in_float32<BFloat16>(ranks, count, operation);
  }
  throw std::logic_error("the fake knows no such type");
}

}  // namespace

/// What all ranks of an operation must agree on.
struct FakeNccl::Signature {
  Kind kind;
  std::size_t count = 0;
  NcclType type = NcclType::uint8;
  NcclOperation operation = NcclOperation::sum;
  int root = 0;
  bool operator==(const Signature&) const = default;
};

struct FakeNccl::Message {
  int peer;
  std::byte* memory;
  std::size_t bytes;
};

/// What one rank brings to an operation.
struct FakeNccl::Share {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::vector<Message> sends{}, receives{};
};

struct FakeNccl::Operation {
  Signature signature;
  std::uint64_t seed;  ///< Decides the order in which ranks are summed.
  std::vector<Share> shares;

  std::size_t ranks() const { return shares.size(); }
  std::size_t bytes() const { return signature.count * bytes_of(signature.type); }

  std::vector<std::byte> sum(std::size_t offset) const {
    std::vector<const std::byte*> from;
    for (const auto& share : shares) from.push_back(share.from + offset);
    std::mt19937_64 random(seed);
    std::ranges::shuffle(from, random);
    return reduced(from, signature.count, signature.type, signature.operation);
  }

  /// Reads everything before it writes anything: an operation may be in place.
  void execute() const {
    std::vector<std::pair<std::byte*, std::vector<std::byte>>> results;
    for (std::size_t rank = 0; rank < ranks(); ++rank) {
      const auto& share = shares[rank];
      switch (signature.kind) {
        case Kind::all_reduce:
          results.emplace_back(share.to, sum(0));
          break;
        case Kind::reduce_scatter:
          results.emplace_back(share.to, sum(rank * bytes()));
          break;
        case Kind::all_gather:
          for (std::size_t from = 0; from < ranks(); ++from)
            results.emplace_back(share.to + from * bytes(),
                                 std::vector(shares[from].from, shares[from].from + bytes()));
          break;
        case Kind::broadcast: {
          const auto* from = shares[static_cast<std::size_t>(signature.root)].from;
          results.emplace_back(share.to, std::vector(from, from + bytes()));
          break;
        }
        case Kind::exchange:
          for (const auto& message : share.receives) {
            const auto& sends = shares[static_cast<std::size_t>(message.peer)].sends;
            const auto sent = std::ranges::find(sends, static_cast<int>(rank), &Message::peer);
            if (sent != sends.end())
              results.emplace_back(message.memory, std::vector(sent->memory, sent->memory + sent->bytes));
          }
          break;
      }
    }
    for (const auto& [to, bytes] : results) std::ranges::copy(bytes, to);
  }

  /// The memory that the rank's share writes.
  std::vector<std::pair<std::byte*, std::size_t>> written_by(const Share& share) const {
    if (signature.kind == Kind::exchange) {
      std::vector<std::pair<std::byte*, std::size_t>> memory;
      for (const auto& message : share.receives) memory.emplace_back(message.memory, message.bytes);
      return memory;
    }
    return {{share.to, signature.kind == Kind::all_gather ? bytes() * ranks() : bytes()}};
  }
};

struct FakeNccl::Clique {
  std::vector<Communicator*> members;  ///< Null: not there yet, or gone.
  std::size_t joined = 0;
  // For each operation.
  std::vector<std::shared_ptr<Operation>> operations;
  std::vector<std::shared_ptr<FakeCuda::Joint>> joints;
  std::vector<std::size_t> issued;  ///< How many ranks have made the call.
};

struct FakeNccl::Communicator {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  bool gone = false, connected = false, finalized = false;
  std::uint64_t polls = 0;  ///< Until the last call is done.
  std::size_t next = 0;     ///< The number of its next operation.
  NcclCode error = nccl_code::success;
  StreamHandle stream = nullptr;            ///< Where `pending` is to go.
  std::shared_ptr<FakeCuda::Part> pending;  ///< Not on its stream yet.
  std::vector<std::shared_ptr<FakeCuda::Part>> parts;
};

/// The functions of the table.
struct FakeNcclFunctions {
  using Share = FakeNccl::Share;
  using Signature = FakeNccl::Signature;

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
    *id = {};
    const auto text = "id " + std::to_string(++the_nccl->ids_);
    text.copy(id->bytes, sizeof id->bytes);
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
    *error = communicator.error != nccl_code::success ? communicator.error
             : busy                                   ? nccl_code::in_progress
                                                      : nccl_code::success;
    if (const auto fault = the_nccl->asynchronous_.find(communicator.rank);
        fault != the_nccl->asynchronous_.end())
      *error = fault->second;
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
                      std::vector<FakeNccl::Message>& messages, FakeNccl::Message message) {
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
               {peer, const_cast<std::byte*>(bytes(from)), count * bytes_of(type)});
  }
  static NcclCode receive(void* to, std::size_t count, NcclType type, int peer, CommunicatorHandle handle,
                          StreamHandle stream) {
    return add("ncclRecv", handle, stream, group().share.receives, {peer, bytes(to), count * bytes_of(type)});
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
    const auto size = open.share.sends.empty() ? 0 : open.share.sends[0].bytes;
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

FakeNccl::FakeNccl(FakeCuda& cuda, std::uint64_t seed, FirstOperation first)
    : cuda_(cuda), first_(first), random_(seed) {
  if (the_nccl != nullptr) throw std::logic_error("there is a FakeNccl already");
  the_nccl = this;
}

FakeNccl::~FakeNccl() {
  std::unique_lock lock(mutex_);
  ending_ = true;
  changed_.notify_all();
  changed_.wait(lock, [&] { return hanging_ == 0; });
  the_nccl = nullptr;
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
  ++calls_[function];
  if (hangs_[function]) {
    ++hanging_;
    changed_.wait(lock, [&] { return ending_; });
    --hanging_;
    changed_.notify_all();
    return nccl_code::internal_error;
  }
  const auto fault = faults_.find(function);
  return fault == faults_.end() || --fault->second.nth != 0 ? nccl_code::success : fault->second.code;
}

FakeNccl::Communicator& FakeNccl::state_of(CommunicatorHandle handle) {
  return *reinterpret_cast<Communicator*>(handle);
}

void FakeNccl::misuse(const char* function, const char* what) {
  misuses_.push_back(std::string(function) + ": " + what);
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
  auto& clique = cliques_[std::string(id.bytes, sizeof id.bytes)];
  if (clique == nullptr) {
    clique = std::make_shared<Clique>();
    clique->members.resize(static_cast<std::size_t>(size));
  }
  auto& place = clique->members.at(static_cast<std::size_t>(rank));
  if (place != nullptr || clique->members.size() != static_cast<std::size_t>(size)) {
    misuse("ncclCommInitRankConfig", "the rank is there already, or has another size");
    return nccl_code::invalid_usage;
  }
  auto& communicator = *communicators_.emplace_back(std::make_unique<Communicator>());
  communicator.clique = clique;
  communicator.rank = rank;
  communicator.polls = random_() % (most_polls + 1);
  place = &communicator;
  ++clique->joined;
  *handle = reinterpret_cast<CommunicatorHandle>(&communicator);
  return nccl_code::in_progress;
}

/// A poll. What is not on its stream yet goes there with the last one.
bool FakeNccl::in_progress(Communicator& communicator) {
  const auto& clique = *communicator.clique;
  if (!communicator.connected && clique.joined < clique.members.size()) return true;
  if (communicator.polls > 0) --communicator.polls;
  const bool asks_all =
      first_ == FirstOperation::when_asked && communicator.next == 1 && communicator.pending;
  if (communicator.polls > 0 || (asks_all && clique.issued[0] < clique.members.size())) {
    communicator.polls = std::max<std::uint64_t>(communicator.polls, 1);
    return true;
  }
  communicator.connected = true;
  if (communicator.pending) cuda_.launch(communicator.stream, std::exchange(communicator.pending, nullptr));
  return false;
}

NcclCode FakeNccl::issue(const char* function, Communicator& communicator, StreamHandle stream,
                         const Signature& signature, Share share) {
  if (!usable(function, communicator)) return nccl_code::invalid_argument;
  auto& clique = *communicator.clique;
  const auto number = communicator.next++;
  if (number == clique.operations.size()) {
    auto operation = std::make_shared<Operation>();
    operation->signature = signature;
    operation->seed = random_();
    operation->shares.resize(clique.members.size());
    auto& joint = *clique.joints.emplace_back(std::make_shared<FakeCuda::Joint>());
    joint.missing = clique.members.size();
    joint.work = [operation] { operation->execute(); };
    clique.operations.push_back(std::move(operation));
    clique.issued.push_back(0);
  }
  ++clique.issued[number];
  const auto operation = clique.operations[number];
  const auto part = std::make_shared<FakeCuda::Part>();
  part->joint = clique.joints[number];
  if (!(operation->signature == signature)) {
    mismatches_.push_back(std::string(function) + " of rank " + std::to_string(communicator.rank));
    // A joint of its own that never ends: this rank and the others wait for each other.
    part->joint = std::make_shared<FakeCuda::Joint>();
    part->joint->missing = 2;
    for (auto* member : clique.members)
      if (member != nullptr) member->error = nccl_code::invalid_usage;
  }
  auto& own = operation->shares[static_cast<std::size_t>(communicator.rank)] = std::move(share);
  for (const auto& [memory, bytes] : operation->written_by(own))
    if (bytes > 0 && !cuda_.is_device_memory(memory, bytes))
      misuse(function, "this is no memory of the device");
  part->instead = [operation, &own] {
    for (const auto& [memory, bytes] : operation->written_by(own)) std::fill_n(memory, bytes, any_value);
  };
  communicator.parts.push_back(part);
  communicator.stream = stream;
  communicator.pending = part;
  communicator.polls = random_() % (most_polls + 1);
  if (first_ == FirstOperation::when_asked && number == 0) communicator.polls = 1;
  if (communicator.polls > 0) return nccl_code::in_progress;
  cuda_.launch(stream, std::exchange(communicator.pending, nullptr));
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
  if (aborts)
    for (const auto& part : communicator.parts) cuda_.release(*part);
  communicator.clique->members[static_cast<std::size_t>(communicator.rank)] = nullptr;
  if (aborts && tells_)
    for (auto* member : communicator.clique->members)
      if (member != nullptr) member->error = nccl_code::remote_error;
  return nccl_code::success;
}

void FakeNccl::fail(const std::string& function, int nth, NcclCode code) {
  const std::lock_guard lock(mutex_);
  faults_[function] = {nth, code};
}

void FakeNccl::fail_asynchronously(int rank, NcclCode code) {
  const std::lock_guard lock(mutex_);
  asynchronous_[rank] = code;
}

void FakeNccl::tell_of_aborts() {
  const std::lock_guard lock(mutex_);
  tells_ = true;
}

void FakeNccl::hang(const std::string& function) {
  const std::lock_guard lock(mutex_);
  hangs_[function] = true;
}

std::vector<std::string> FakeNccl::mismatches() {
  const std::lock_guard lock(mutex_);
  return mismatches_;
}

std::vector<std::string> FakeNccl::misuses() {
  const std::lock_guard lock(mutex_);
  return misuses_;
}

int FakeNccl::live() {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(
      std::ranges::count(communicators_, false, [](const auto& one) { return one->gone; }));
}

int FakeNccl::calls(const std::string& function) {
  const std::lock_guard lock(mutex_);
  return calls_[function];
}

}  // namespace accelmgr::test
