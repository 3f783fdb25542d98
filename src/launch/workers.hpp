// The worker strings: which hosts take part, and, once expanded, which process serves where.
//
//   worker form   name:ordinal;[grpc://]host:port|...   one entry a host; its processes at port, port+1, ...
//   TPU form      name;ordinal;host:port|...            one entry a host
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch/host_port.hpp"

namespace accelmgr::launch {

enum class WorkerForm { none, worker, tpu };

struct Worker {
  std::string name;
  int ordinal = 0;
  HostPort address;

  bool operator==(const Worker&) const = default;
};

inline constexpr const char* local_worker_name = "localservice";
inline constexpr int tpu_devices = 8;  ///< Of a host in the TPU form, unless configured.

struct WorkerList {
  WorkerForm form = WorkerForm::none;
  std::vector<Worker> hosts;

  bool operator==(const WorkerList&) const = default;
};

/// Either form, told by the first entry; no mixture. Throws ConfigError: "Bad worker syntax: <the part>", and
/// with it "Bad worker HOST:PORT format: <it>" where only the address is at fault; a name and ordinal that
/// occur twice.
WorkerList parse_workers(std::string_view text);
/// As above, where only one form is allowed.
std::vector<Worker> parse_workers(std::string_view text, WorkerForm form);

/// "name:ordinal" with nothing after it; the address is left empty. Throws as above.
Worker parse_local_worker(std::string_view text);

/// What parse_workers() reads back. The worker form is written with grpc://.
std::string text(std::span<const Worker> workers, WorkerForm form);

/// One entry per process: host h's process i has ordinal h * devices + i, and port + i. Throws ConfigError
/// for ports beyond 65535 and for two processes with one address.
std::vector<Worker> expand_workers(std::span<const Worker> hosts, int devices);

/// The processes of one host without configured workers, by their bound ports.
std::vector<Worker> local_workers(const std::string& hostname, std::span<const int> ports);

/// Names every device of every host: "GPU:1;/job:name/replica:0/task:1/device:GPU:0|..."; a process sees its
/// device as the only one, so it is number 0 of its task. `label`: "GPU", "CPU".
std::string device_map(std::span<const Worker> processes, std::string_view label);

}  // namespace accelmgr::launch
