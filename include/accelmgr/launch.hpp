// Starting one program, or one function, as several processes that know their ranks, and ending them.
//
//   accelmgr::launch::register_function("train", [](int rank, const Value& args) -> Value { ... });
//   accelmgr::init(argc, argv);                       // first in main(), after the registrations
//   auto context = launch::spawn("train", {0.1, 100}, {.nprocs = 4, .join = false});
//   while (!context.join(1.0)) show_progress();
//   for (const auto& result : context.results()) ...
//
// However it ends, and whoever is killed, no process is left: neither the ranks nor what they have started.
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

namespace accelmgr::launch {

/// Arguments and results: whatever JSON can say, and bytes (Value::binary).
using Value = nlohmann::json;
/// Called with the rank in the world. What it returns arrives in SpawnContext::results().
using Function = std::function<Value(int rank, const Value& args)>;

/// Before accelmgr::init(). Throws UsageError when the name is taken.
void register_function(const std::string& name, Function function);

using accelmgr::StartMethod;

struct Options {
  /// Processes on this host; -1: the visible GPUs, or the cores where there are none or `backend` is one of
  /// CPUs.
  int nprocs = -1;
  bool join = true;  ///< spawn() returns when all have ended.
  /// Whether they are ended when the context is destroyed or this program returns from main(); otherwise the
  /// program waits for them before it ends.
  bool daemon = false;
  StartMethod start_method = StartMethod::spawn;
  /// Of the collectives between them: auto (by device kind and hosts), serial, shm, gloo, nccl.
  std::string backend = "auto";
  std::string gpus = {};  ///< Absolute ids, one per process: "4,5". Empty: the first visible ones.
  std::string xpus = {};
  /// Of all hosts, this one's among them: "192.168.0.16,192.168.0.17"; empty: this one.
  std::string ips = {};
  std::string master_addr = {};  ///< Empty: the first of `ips`, or 127.0.0.1.
  int master_port = 0;           ///< 0: none is told to the processes of one host; of several, 2222.
  /// "name:ordinal;[grpc://]host:port|..." of all hosts; empty: $ACCELMGR_WORKERS.
  std::string workers = {};
  int nnodes = 0;       ///< Hosts; 0: as many as `ips` or `workers`, or world_size / nprocs.
  int node_rank = -1;   ///< Of this host; -1: its place among `ips` or `workers`, or by rank_offset.
  int rank_offset = 0;  ///< Rank in the world of the first process here; 0: node_rank times nprocs.
  int world_size = 0;   ///< 0: nprocs times the number of hosts.
  std::function<void()> setup = {};  ///< Called in each process before the function; `fork` only.
  std::string setup_name = {};       ///< A registered function to be called so, under any start method.
  bool print_config = false;         ///< Prints the resolved options, with where each value came from.
  bool oversubscribe = false;        ///< More processes than GPUs may share them.
  double timeout_s = 300;            ///< Of the collectives between them.
  double terminate_timeout_s = 5;    ///< From asking the others to end (TERM) until they are killed.
  std::map<std::string, std::string> environment = {};  ///< Besides what they get anyway.
};

/// The options by their names ("nprocs", "gpus", ...), as texts. An unknown one is a ConfigError that names
/// the nearest known one; a deprecated one (selected_devices, started_port, cluster_node_ips, node_ip,
/// use_paddlecloud) is logged as a warning, and works.
Options options_from(const std::map<std::string, std::string>& texts);

/// How one process failed.
struct Failure {
  int rank = -1;        ///< In the world.
  int exit_code = 0;    ///< 0 when a signal killed it.
  int signal = 0;       ///< 0 when it exited.
  std::string phase{};  ///< "setup", "function", "start"; empty when the process could not say.
  std::string type{};   ///< Name of the exception's type; empty if none was thrown.
  std::string what{};
  std::string trace{};  ///< The exceptions nested in it, outermost first; of Python, its traceback.
  double time_s = 0;    ///< Since 1970.
};

/// The first failure in time; the other processes were ended because of it. what() says all of it.
class SpawnError : public Error {
 public:
  SpawnError(Failure first, std::vector<Failure> later);
  int rank() const noexcept { return first_.rank; }
  int signal() const noexcept { return first_.signal; }
  int exit_code() const noexcept { return first_.exit_code; }
  const std::string& trace() const noexcept { return first_.trace; }
  const Failure& first() const noexcept { return first_; }
  /// Those that failed of themselves after it, in order of time; not those that were ended.
  const std::vector<Failure>& later() const noexcept { return later_; }

 private:
  Failure first_;
  std::vector<Failure> later_;
};

/// Processes that were started together. One thread at a time.
class SpawnContext {
 public:
  SpawnContext(SpawnContext&&) noexcept;
  SpawnContext& operator=(SpawnContext&&) noexcept;
  ~SpawnContext();

  /// Waits until all have ended (true), or one has failed (SpawnError, after the rest have been ended), or
  /// the time is over (false). No timeout: as long as it takes.
  bool join(std::optional<double> timeout_s = std::nullopt);
  std::vector<pid_t> pids() const;
  /// Ends all that still run: TERM, KILL after the bound. Returns when none is left. No failure.
  void terminate() noexcept;
  /// What the functions returned, by local rank; null of those that have not returned.
  const std::vector<Value>& results() const noexcept;

  class Processes;
  explicit SpawnContext(std::unique_ptr<Processes> processes) noexcept;

 private:
  std::unique_ptr<Processes> processes_;
};

/// Starts options.nprocs processes, each of which calls the function. One process with `join`: it is called
/// in place. Throws ConfigError for options that cannot be, SystemError, and SpawnError if `join`.
/// `function`: a registered name (all start methods), or a callable (`fork` only; otherwise UsageError).
SpawnContext spawn(const std::variant<std::string, Function>& function, const Value& args = Value::array(),
                   const Options& options = {});

/// One process at a time, of those of one spawn() or one host's `accelmgr spawn`, runs something. The death
/// of the process that is in it lets the next one in.
class SerialExecutor {
 public:
  /// Executors of the same name are one.
  explicit SerialExecutor(std::string name = "serial", double timeout_s = 300);
  ~SerialExecutor();
  SerialExecutor(const SerialExecutor&) = delete;
  SerialExecutor& operator=(const SerialExecutor&) = delete;

  /// What `function` returns or throws. Throws SessionError when it has not got in by the timeout; it names
  /// the process that is inside.
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
