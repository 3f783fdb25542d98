#include "launcher/launch/compat/workers.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/parse_number.hpp"
#include "base/split.hpp"

namespace accelmgr::launch {
namespace {

constexpr std::string_view scheme = "grpc://";
constexpr const char* key = "workers";

[[noreturn]] void refuse(std::string_view part, const std::string& what = {}) {
  throw ConfigError(fmt::format("Bad worker syntax: {}{}{}", part, what.empty() ? "" : ": ", what), key);
}

constexpr const char* both_forms =
    "it must be name:ordinal;host:port, or name;ordinal;host:port (the TPU form)";

bool is_name(std::string_view text) {
  return !text.empty() &&
         std::ranges::all_of(text, [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; });
}

// "name<separator>ordinal"
Worker parse_identity(std::string_view text, char separator, std::string_view part,
                      const std::string& right) {
  const auto at = text.find(separator);
  if (at == std::string_view::npos) refuse(part, right);
  const auto name = text.substr(0, at);
  const auto digits = text.substr(at + 1);
  if (!is_name(name))
    refuse(part, fmt::format("'{}' is not the name of a worker (letters, digits and _)", name));
  const auto ordinal = base::parse_number<int>(digits);
  if (!ordinal || *ordinal < 0 || digits.starts_with('-'))
    refuse(part, fmt::format("'{}' is not an ordinal, which must be a whole number of at least 0", digits));
  return {std::string(name), *ordinal, {}};
}

ipc::HostPort parse_address(std::string_view address, std::string_view part) {
  try {
    return ipc::parse_host_port(address);
  } catch (const ConfigError& error) {
    refuse(part, fmt::format("Bad worker HOST:PORT format: {}: {}", address, error.what()));
  }
}

// The address follows the only ';' of the worker form, or the second one of the TPU form.
Worker parse_entry(std::string_view part, WorkerForm form) {
  const auto first = part.find(';');
  const auto end =
      form == WorkerForm::tpu && first != std::string_view::npos ? part.find(';', first + 1) : first;
  if (end == std::string_view::npos) refuse(part, both_forms);
  auto worker = parse_identity(part.substr(0, end), form == WorkerForm::tpu ? ';' : ':', part, both_forms);
  auto address = part.substr(end + 1);
  if (form == WorkerForm::worker && address.starts_with(scheme)) address.remove_prefix(scheme.size());
  worker.address = parse_address(address, part);
  return worker;
}

WorkerForm form_of(std::string_view part) {
  const auto end_of_name = part.find_first_of(":;");
  return end_of_name != std::string_view::npos && part[end_of_name] == ';' ? WorkerForm::tpu
                                                                           : WorkerForm::worker;
}

}  // namespace

std::vector<Worker> parse_workers(std::string_view text, WorkerForm form) {
  std::vector<Worker> workers;
  std::set<std::pair<std::string, int>> seen;
  for (const auto part : base::parts_of(text, '|')) {
    auto worker = parse_entry(part, form);
    if (!seen.emplace(worker.name, worker.ordinal).second)
      throw ConfigError(fmt::format("worker {}:{} appears twice in '{}'", worker.name, worker.ordinal, text),
                        key);
    workers.push_back(std::move(worker));
  }
  return workers;
}

WorkerList parse_workers(std::string_view text) {
  const auto form = form_of(base::parts_of(text, '|').front());
  return {form, parse_workers(text, form)};
}

Worker parse_local_worker(std::string_view text) {
  return parse_identity(text, ':', text, "it must be name:ordinal");
}

std::string text(std::span<const Worker> workers, WorkerForm form) {
  std::string joined;
  for (const auto& worker : workers) {
    if (!joined.empty()) joined += '|';
    joined += form == WorkerForm::tpu
                  ? fmt::format("{};{};{}", worker.name, worker.ordinal, text(worker.address))
                  : fmt::format("{}:{};{}{}", worker.name, worker.ordinal, scheme, text(worker.address));
  }
  return joined;
}

std::vector<Worker> expand_workers(std::span<const Worker> nodes, int devices) {
  std::vector<Worker> processes;
  std::map<std::string, int> at;
  for (const auto& node : nodes) {
    if (node.address.port + devices - 1 > ipc::highest_port)
      throw ConfigError(
          fmt::format("worker {}:{} at {} has {} processes, each with a port of its own; the last "
                      "one would have port {}, but {} is the highest port",
                      node.name, node.ordinal, text(node.address), devices, node.address.port + devices - 1,
                      ipc::highest_port),
          key);
    for (int i = 0; i < devices; ++i) {
      const int ordinal = static_cast<int>(processes.size());
      ipc::HostPort address{node.address.host, node.address.port + i};
      if (const auto [other, is_new] = at.emplace(text(address), ordinal); !is_new)
        throw ConfigError(
            fmt::format("processes {} and {} of the workers have the same address, {}: each node "
                        "takes {} ports in a row",
                        other->second, ordinal, other->first, devices),
            key);
      processes.push_back({node.name, ordinal, std::move(address)});
    }
  }
  return processes;
}

std::vector<Worker> local_workers(const std::string& hostname, std::span<const int> ports) {
  std::vector<Worker> processes;
  for (const int port : ports)
    processes.push_back({local_worker_name, static_cast<int>(processes.size()), {hostname, port}});
  return processes;
}

std::string device_map(std::span<const Worker> processes, std::string_view label) {
  std::string map;
  for (const auto& process : processes)
    map += fmt::format("{}{}:{};/job:{}/replica:0/task:{}/device:XLA_{}:0", map.empty() ? "" : "|", label,
                       process.ordinal, local_worker_name, process.ordinal, label);
  return map;
}

}  // namespace accelmgr::launch
