// The rank of this process in its world, and collectives of numbers, texts and objects. Collectives of
// tensors are in accelmgr/distributed.hpp. Works without any configuration (serial: rank 0 of 1), in a
// process started by spawn(), `accelmgr spawn` or torchrun, and after initialize().
//
// The context is found at the first call that needs it ("lazy sync"): the one of initialize(), else the one
// in a launcher's environment variables (RANK, WORLD_SIZE, ...), else serial.
//
// One thread at a time may call these functions. Collectives block, at most for the context's timeout, and
// throw CollectiveError (accelmgr/communicator.hpp). With one process they return their input.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "accelmgr/launch.hpp"

namespace accelmgr::distributed {

using launch::Value;

std::optional<std::string> backend();           ///< nullopt in serial; "shm", "gloo", "nccl".
std::vector<std::string> available_backends();  ///< What initialize() accepts; nccl only with a visible GPU.
/// "serial"; "accelmgr-dist" when accelmgr started the ranks; "native-dist" when another launcher did.
std::string model_name();
std::vector<std::string> registered_computation_models();  ///< All values of model_name().
bool has_native_dist_support();                            ///< True if this program has torch's c10d.
bool has_xla_support();
bool has_hvd_support();
/// Device of the collectives, as torch writes it: "cpu"; under nccl "cuda:N", where N is the local rank
/// modulo the number of CUDA devices that torch sees here.
std::string device_name();
// These functions do not connect to other ranks. Before the ranks have met, it may be unknown which ranks
// share a node (no LOCAL_RANK in the environment, and MASTER_ADDR is no loopback address). Then
// get_local_rank(), get_nproc_per_node(), get_nnodes() and get_node_rank() throw UsageError.
int get_rank();
int get_local_rank();
int get_world_size();
int get_nproc_per_node();
int get_nnodes();
int get_node_rank();
std::string hostname();

/// Sets the value of get_local_rank(), for a context that was made by hand. Throws UsageError for a negative
/// value.
void set_local_rank(int index);

/// Looks for the context again, for example after finalize() or a change of the environment. Does not replace
/// the context of initialize(). temporary: every later call looks again.
void sync(bool temporary = false);

struct InitializeOptions {
  /// Bounds the rendezvous and each collective. nullopt: the launcher's timeout, or 300 without a launcher.
  std::optional<double> timeout_s = std::nullopt;
  std::string init_method = {};            ///< "env://" (the default), "tcp://HOST:PORT", "file:///PATH".
  std::optional<int> rank = std::nullopt;  ///< nullopt: from the environment.
  std::optional<int> world_size = std::nullopt;  ///< nullopt: from the environment.
};
/// Joins the other processes. Blocks until all have joined. backend: one of available_backends(), or "auto":
/// shm on one node, gloo over several. With backend nccl, and in a launch for GPUs, torch's GPU with the
/// number of the local rank is current afterwards. Throws ConfigError for an unknown backend (the error lists
/// the available ones) and for values that contradict each other, CollectiveError{timeout} with the missing
/// ranks and the address, UsageError when this process has a context already.
void initialize(const std::string& backend, const InitializeOptions& options = {});
/// Leaves the world. This process is serial afterwards.
void finalize();

struct SpawnOptions {
  int nproc_per_node = 1;
  int nnodes = 1;
  int node_rank = 0;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;  ///< 0: a free port on one node; 2222 on several.
  std::string init_method = "env://";
  double timeout_s = 300;
  launch::StartMethod start_method = launch::StartMethod::spawn;
  bool join = true;
  bool daemon = false;
};
/// Starts nproc_per_node processes with a context of `backend`. Each calls fn(local rank, args). `kwargs` is
/// an object or null; an object is appended to the args of fn. Even a single process is a new one. Blocks and
/// throws as launch::spawn() does, and throws ConfigError for invalid options.
launch::SpawnContext spawn(const std::string& backend, const std::variant<std::string, launch::Function>& fn,
                           const Value& args = Value::array(), const Value& kwargs = nullptr,
                           const SpawnOptions& options = {});

/// Logs the values above at level info.
void show_config();

/// Some ranks of the world. Cheap to copy. In a process outside the group, collectives return their input.
class Group {
 public:
  /// The members' ranks in the world, ascending.
  const std::vector<int>& ranks() const noexcept;
  bool contains(int rank) const noexcept;  ///< `rank` is a rank in the world.
  int rank() const noexcept;               ///< Rank of this process in the group; -1 for a process outside.
  int size() const noexcept;

  struct State;
  explicit Group(std::shared_ptr<State> state) noexcept : state_(std::move(state)) {}
  const std::shared_ptr<State>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<State> state_;
};
/// Makes a group. All members must call it; other ranks may. Blocks members until all have called it.
/// backend decides how tensors on GPUs go: nullopt, or one of available_backends(). Throws ConfigError for
/// ranks that are out of range, listed twice or missing, and for a backend that cannot serve them. In a world
/// of one `ranks` may be empty; the group then has no members.
Group new_group(const std::vector<int>& ranks, const std::optional<std::string>& backend = std::nullopt);

/// A group, a list of ranks in the world, or nothing for all ranks.
using GroupArgument = std::variant<std::monostate, Group, std::vector<int>>;

void barrier();

/// op: SUM, AVG, PRODUCT, MIN, MAX, AND, OR.
double all_reduce(double number, const std::string& op = "SUM", const GroupArgument& group = {});
std::vector<std::string> all_gather(const std::string& text, const GroupArgument& group = {});
/// Throws SessionError, on all ranks, for an object of more than 256 levels of lists and objects.
std::vector<Value> all_gather_object(const Value& object, const GroupArgument& group = {});

/// Returns the value of rank `src`. The other ranks pass a value of the same kind; in safe mode they may pass
/// any.
double broadcast(double number, int src = 0, bool safe_mode = false);
std::string broadcast(const std::string& text, int src = 0, bool safe_mode = false);
inline std::string broadcast(const char* text, int src = 0, bool safe_mode = false) {
  return broadcast(std::string(text), src, safe_mode);
}

/// Wraps a function so that it runs on one rank only; it returns nullopt on the others. with_barrier: all
/// ranks wait until it has run.
template <class Function>
auto one_rank_only(Function function, int rank = 0, bool with_barrier = false) {
  return [function = std::move(function), rank, with_barrier](auto&&... args) {
    using Result = decltype(function(std::forward<decltype(args)>(args)...));
    if constexpr (std::is_void_v<Result>) {
      if (get_rank() == rank) function(std::forward<decltype(args)>(args)...);
      if (with_barrier) barrier();
    } else {
      std::optional<Result> result;
      if (get_rank() == rank) result.emplace(function(std::forward<decltype(args)>(args)...));
      if (with_barrier) barrier();
      return result;
    }
  };
}

/// A scope that rank `rank` runs first: the other ranks wait in the constructor until that rank destroys its
/// object. `local`: `rank` is a local rank, and goes first on each node. Throws ConfigError "rank should be
/// between 0 and N - 1, but given R".
class OneRankFirst {
 public:
  explicit OneRankFirst(int rank = 0, bool local = false);
  ~OneRankFirst() noexcept(false);
  OneRankFirst(const OneRankFirst&) = delete;
  OneRankFirst& operator=(const OneRankFirst&) = delete;

 private:
  bool first_;
  int exceptions_;
};
[[nodiscard]] inline OneRankFirst one_rank_first(int rank = 0, bool local = false) {
  return OneRankFirst(rank, local);
}

}  // namespace accelmgr::distributed
