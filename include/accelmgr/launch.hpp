// Starts a function as several processes that know their ranks, and ends them.
//
//   accelmgr::launch::register_function("train", [](int rank, const Value& args) -> Value { ... });
//   accelmgr::init(argc, argv);                       // first in main(), after the registrations
//   auto context = launch::spawn("train", {0.1, 100}, {.nprocs = 4, .join = false});
//   while (!context.join(1.0)) show_progress();
//   for (const auto& result : context.results()) ...
//
// However a launch ends, and whichever process is killed, no process is left: neither the ranks nor the
// processes that they have started.
#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/failure.hpp"

namespace accelmgr::launch {

/// Arguments and results: any JSON value, and bytes (Value::binary).
using Value = nlohmann::json;
/// `rank` is the rank in the world. SpawnContext::results() has the returned values.
using Function = std::function<Value(int rank, const Value& args)>;

/// Throws UsageError when the name is taken.
/// Requires: accelmgr::init() was not called yet.
void register_function(const std::string& name, Function function);

using accelmgr::StartMethod;

struct Options {
  /// Processes on this node; -1: one per visible GPU, or one per core if there is no GPU, or one for
  /// `backend` serial.
  int nprocs = -1;
  bool join = true;  ///< spawn() blocks until all processes have ended.
  /// true: the processes are ended when the context is destroyed or this program returns from main(). false:
  /// this program waits for them before it ends.
  bool daemon = false;
  StartMethod start_method = StartMethod::spawn;
  /// Backend of the processes' collectives: auto (by device kind and nodes), serial, shm, gloo, nccl.
  std::string backend = "auto";
  /// Network interface at which ranks of several nodes connect: "eth0". Empty: $ACCELMGR_LAUNCH_INTERFACE,
  /// else the ranks choose by $GLOO_SOCKET_IFNAME, the node's name or the default route.
  std::string interface = {};
  /// Absolute ids, one per process: "4,5". Empty: the first visible ones. A process sees the devices of all
  /// processes of its node, and local rank r has number r among them; with `workers` it sees its own device
  /// only.
  std::string gpus = {};
  std::string xpus = {};
  /// Addresses of all nodes, including this one: "192.168.0.16,192.168.0.17"; empty: this node alone.
  std::string ips = {};
  std::string master_addr = {};  ///< Empty: the first of `ips`, or 127.0.0.1.
  int master_port = 0;           ///< 0: 2222 with several nodes, unset with one.
  /// All nodes, as "name:ordinal;[grpc://]host:port|..."; empty: $ACCELMGR_WORKERS.
  std::string workers = {};
  int nnodes = 0;       ///< Nodes; 0: as many as `ips` or `workers`, or world_size / nprocs.
  int node_rank = -1;   ///< Of this node; -1: its place among `ips` or `workers`, or by rank_offset.
  int rank_offset = 0;  ///< Rank in the world of the first process here; 0: node_rank times nprocs.
  int world_size = 0;   ///< 0: nprocs times the number of nodes.
  std::function<void()> setup = {};  ///< Called in each process before the function; `fork` only.
  std::string setup_name = {};     ///< The name of a registered function to call likewise; any start method.
  bool print_config = false;       ///< Print the resolved options and the source of each value.
  bool oversubscribe = false;      ///< Allow more processes than GPUs; they share the GPUs.
  double timeout_s = 300;          ///< Of each collective between the processes.
  double terminate_timeout_s = 5;  ///< Between SIGTERM and SIGKILL when processes are ended.
  std::map<std::string, std::string> environment = {};  ///< Variables to add to each process's environment.
};

/// Options from texts, by name ("nprocs", "gpus", ...). Throws ConfigError for an unknown name; the error
/// names the nearest known one. A deprecated name (selected_devices, started_port, cluster_node_ips, node_ip,
/// use_paddlecloud=false) works, and logs a warning.
Options options_from(const std::map<std::string, std::string>& texts);

/// The earliest failure of a launch, after which the other processes were ended. what() has all details.
class SpawnError : public Error {
 public:
  SpawnError(Failure first, std::vector<Failure> later);
  int rank() const noexcept { return first_.rank; }
  int signal() const noexcept { return first_.signal; }
  int exit_code() const noexcept { return first_.exit_code; }
  const std::string& trace() const noexcept { return first_.trace; }
  const Failure& first() const noexcept { return first_; }
  /// Later failures of other processes, by time; without the processes that the launch itself ended.
  const std::vector<Failure>& later() const noexcept { return later_; }

 private:
  Failure first_;
  std::vector<Failure> later_;
};

/// One process of a launch.
struct ProcessState {
  pid_t pid = 0;
  int pidfd = -1;                    ///< Readable when the process has ended. It belongs to the SpawnContext.
  std::optional<int> exit_code{};    ///< nullopt: it runs. -N: signal N ended it.
  std::optional<Failure> failure{};  ///< What the process reported.
};

/// The processes of one launch. One thread at a time may use it. The destructor acts as Options::daemon says.
class SpawnContext {
 public:
  SpawnContext(SpawnContext&&) noexcept;
  SpawnContext& operator=(SpawnContext&&) noexcept;
  ~SpawnContext();

  /// Blocks until all processes have ended, and returns true. Returns false when the timeout passes first;
  /// nullopt: no timeout. When a process fails, ends the others and throws SpawnError.
  bool join(std::optional<double> timeout_s = std::nullopt);
  std::vector<pid_t> pids() const;
  /// All processes as they are now, by local rank.
  std::vector<ProcessState> processes();
  /// Blocks until the process `local_rank` has ended. False if the timeout passes first. join() reports its
  /// failure.
  bool wait(int local_rank, std::optional<double> timeout_s = std::nullopt);
  /// Ends all running processes: SIGTERM, then SIGKILL after Options::terminate_timeout_s. Blocks until none
  /// is left. Processes ended so do not count as failed.
  void terminate() noexcept;
  /// Values that the functions returned, by local rank; null for a function that has not returned.
  const std::vector<Value>& results() const noexcept;

  /// Keeps an object that the processes need, until the last one has ended.
  void hold(std::shared_ptr<void> object);

  class Processes;
  explicit SpawnContext(std::unique_ptr<Processes> processes) noexcept;

 private:
  std::unique_ptr<Processes> processes_;
};

/// Starts options.nprocs processes; each calls the function. A single process with `join` is this process:
/// the function is called in place. `function` is a registered name (all start methods) or a callable (`fork`
/// only; otherwise UsageError). Throws ConfigError for invalid options, SystemError, and with `join`
/// SpawnError.
SpawnContext spawn(const std::variant<std::string, Function>& function, const Value& args = Value::array(),
                   const Options& options = {});

/// Lets one process at a time run a function, among the processes of one spawn() or of `accelmgr spawn` on
/// one node. If the process inside dies, the next one may enter.
class SerialExecutor {
 public:
  /// Executors with the same name exclude each other. `timeout_s`: longest wait of run(). Throws UsageError
  /// for an empty name.
  explicit SerialExecutor(std::string name = "serial", double timeout_s = 300);
  ~SerialExecutor();
  SerialExecutor(const SerialExecutor&) = delete;
  SerialExecutor& operator=(const SerialExecutor&) = delete;

  /// Blocks until no other process is inside, then calls `function`, and returns or throws what it does.
  /// Throws SessionError, which names the process inside, when that takes longer than the timeout.
  template <class Call>
  auto run(Call&& function) {
    const Turn turn(*this);
    return std::forward<Call>(function)();
  }

 private:
  class Turn {
   public:
    explicit Turn(SerialExecutor& executor) : executor_(executor) { executor_.enter(); }
    ~Turn() { executor_.leave(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    SerialExecutor& executor_;
  };
  struct Place;
  void enter();
  void leave() noexcept;

  std::unique_ptr<Place> place_;
};

}  // namespace accelmgr::launch
