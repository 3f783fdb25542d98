// Who this process is among others, and collectives of tensors with them. Works without any configuration
// (serial: rank 0 of 1), in a process that spawn() or `accelmgr spawn` or torchrun started, and after
// initialize().
//
// The context is looked for when first asked for ("lazy sync"): that of initialize(), else that of the
// environment a launcher set (RANK, WORLD_SIZE, ...), else serial.
//
// All functions may be called from one thread at a time. Collectives block, at most for the context's
// timeout, and throw CollectiveError (accelmgr/communicator.hpp); with one process they return their input.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
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
std::vector<std::string> available_backends();  ///< Those that can be used here.
std::string model_name();  ///< "serial", "native-dist" (started by others), "accelmgr-dist".
std::vector<std::string> registered_computation_models();  ///< All that model_name() can say.
bool has_native_dist_support();                            ///< c10d is in this libtorch.
bool has_xla_support();
bool has_hvd_support();
/// cpu; under nccl cuda:N, where N is the local rank modulo the number of CUDA devices that torch sees here.
at::Device device();
// Neither of these connects to anybody. Where the ranks share hosts, and which, may be unknown before they
// have met (no LOCAL_RANK in the environment, and MASTER_ADDR is no loopback address): get_local_rank(),
// get_nproc_per_node(), get_nnodes() and get_node_rank() throw UsageError then.
int get_rank();
int get_local_rank();
int get_world_size();
int get_nproc_per_node();
int get_nnodes();
int get_node_rank();
std::string hostname();

/// For a context that was made by hand: what get_local_rank() says from now on. Throws UsageError when
/// negative.
void set_local_rank(int index);

/// Looks for the context again, after it was made or ended by hand. temporary: each getter looks anew.
void sync(bool temporary = false);

struct InitializeOptions {
  /// Of the rendezvous, and of every collective; nullopt: the launcher's, or 300.
  std::optional<double> timeout_s = std::nullopt;
  std::string init_method = {};            ///< "env://" (the default), "tcp://HOST:PORT", "file:///PATH".
  std::optional<int> rank = std::nullopt;  ///< nullopt: of the environment.
  std::optional<int> world_size = std::nullopt;  ///< nullopt: of the environment.
};
/// Joins the other processes. Blocks until all are there. backend: one of the available ones, or "auto": shm
/// on one host, gloo over several. Throws ConfigError for an unknown backend (lists
/// the available ones) or values that contradict each other, CollectiveError{timeout} which names the missing
/// ranks and the address, UsageError when there is a context already.
void initialize(const std::string& backend, const InitializeOptions& options = {});
/// Leaves. Serial again.
void finalize();

struct SpawnOptions {
  int nproc_per_node = 1;
  int nnodes = 1;
  int node_rank = 0;
  std::string master_addr = "127.0.0.1";
  int master_port = 0;  ///< 0: a free one (one node), or 2222.
  std::string init_method = "env://";
  double timeout_s = 300;
  launch::StartMethod start_method = launch::StartMethod::spawn;
  bool join = true;
  bool daemon = false;
};
/// nproc_per_node processes in a context of `backend`, each of which calls fn(local rank, args). `kwargs` is
/// an object, or null; it is the last element of the args that fn gets, if it is no null.
launch::SpawnContext spawn(const std::string& backend, const std::variant<std::string, launch::Function>& fn,
                           const Value& args = Value::array(), const Value& kwargs = nullptr,
                           const SpawnOptions& options = {});

/// Writes the ten values above to the log, level info.
void show_config();

/// Some of the ranks. Cheap to copy. All calls of a process outside of it return its own input.
class Group {
 public:
  /// Ranks in the world, ascending.
  const std::vector<int>& ranks() const noexcept;
  bool contains(int rank) const noexcept;
  int rank() const noexcept;  ///< Of this process within; -1 outside.
  int size() const noexcept;

  struct State;
  explicit Group(std::shared_ptr<State> state) noexcept : state_(std::move(state)) {}
  const std::shared_ptr<State>& state() const noexcept { return state_; }

 private:
  std::shared_ptr<State> state_;
};
/// Called by all members at least. Throws ConfigError for ranks out of range, doubled, or none. backend: that
/// of the context, or another that is available.
Group new_group(const std::vector<int>& ranks, const std::optional<std::string>& backend = std::nullopt);

/// A group, ranks of the world, or nothing: all.
using GroupArgument = std::variant<std::monostate, Group, std::vector<int>>;

void barrier();

/// op: SUM, AVG, PRODUCT, MIN, MAX, AND, OR. The input is left as it is; the result has its shape, dtype and
/// device.
at::Tensor all_reduce(const at::Tensor& tensor, const std::string& op = "SUM",
                      const GroupArgument& group = {});
double all_reduce(double number, const std::string& op = "SUM", const GroupArgument& group = {});
/// The same in the tensor itself, which is returned: of a contiguous one without other memory.
const at::Tensor& all_reduce_(const at::Tensor& tensor, const std::string& op = "SUM",
                              const GroupArgument& group = {});

/// Of tensors of one shape: concatenated on dimension 0 (a 0-d one counts as one element).
at::Tensor all_gather(const at::Tensor& tensor, const GroupArgument& group = {});
/// A tensor of as many elements as ranks, float64. Outside the group: one element, the input.
at::Tensor all_gather(double number, const GroupArgument& group = {});
std::vector<std::string> all_gather(const std::string& text, const GroupArgument& group = {});
std::vector<Value> all_gather_object(const Value& object, const GroupArgument& group = {});

/// That of rank `src`. Others pass a tensor of the same shape and dtype; in safe mode anything, nothing
/// included.
at::Tensor broadcast(const at::Tensor& tensor, int src = 0, bool safe_mode = false);
double broadcast(double number, int src = 0, bool safe_mode = false);
std::string broadcast(const std::string& text, int src = 0, bool safe_mode = false);
inline std::string broadcast(const char* text, int src = 0, bool safe_mode = false) {
  return broadcast(std::string(text), src, safe_mode);
}
/// In safe mode, when this rank does not know what will come.
using Broadcast = std::variant<std::monostate, at::Tensor, double, std::string>;
Broadcast broadcast(const Broadcast& anything, int src = 0, bool safe_mode = true);

/// Block i of dimension 0, reduced, for rank i; dimension 0 is a multiple of the group's size.
at::Tensor reduce_scatter(const at::Tensor& tensor, const std::string& op = "SUM",
                          const GroupArgument& group = {});

/// Block i of dimension 0 goes to rank i; its size is a multiple of the group's. With a backward pass: the
/// gradient goes back the same way. Serial: the input.
at::Tensor all_to_all(const at::Tensor& input, const GroupArgument& group = {});

void send_object(const Value& object, int to);
Value receive_object(int from);

/// A function that runs on one rank only (others get nullopt), and after it, if asked for, everyone waits for
/// it.
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

/// While it lives the others wait in its constructor; this rank goes first. `local`: a rank of each host.
/// Throws ConfigError "rank should be between 0 and N - 1, but given R".
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
