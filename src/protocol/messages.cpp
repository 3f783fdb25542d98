#include "protocol/messages.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "ipc/socket.hpp"

namespace accelmgr::protocol {
namespace {

using nlohmann::json;

Failed describe(const std::exception& error) {
  Failed failed{.type = "Error", .what = error.what(), .key = {}, .rank = -1, .phase = {}};
  if (const auto* config = dynamic_cast<const ConfigError*>(&error)) {
    failed.type = "ConfigError";
    failed.key = config->key();
  } else if (const auto* runner = dynamic_cast<const RunnerError*>(&error)) {
    failed.type = "RunnerError";
    failed.rank = runner->rank();
    failed.phase = runner->phase();
  } else if (dynamic_cast<const ModelError*>(&error) != nullptr) {
    failed.type = "ModelError";
  } else if (dynamic_cast<const DataError*>(&error) != nullptr) {
    failed.type = "DataError";
  } else if (dynamic_cast<const SessionError*>(&error) != nullptr) {
    failed.type = "SessionError";
  } else if (dynamic_cast<const UsageError*>(&error) != nullptr) {
    failed.type = "UsageError";
  }
  return failed;
}

ipc::Message receive(int socket, base::Deadline deadline, const char* who) {
  auto message = ipc::receive(socket, deadline);
  if (!message) throw SessionError(fmt::format("the {} closed its socket before it answered", who));
  return std::move(*message);
}

}  // namespace

void send_configuration(int socket, const std::string& yaml) { ipc::send_text(socket, yaml); }

std::string receive_configuration(int socket, base::Deadline deadline) {
  auto text = ipc::receive_text(socket, deadline);
  if (!text) throw SessionError("the host ended before it sent a configuration");
  return *text;
}

void send_started(int socket, const std::vector<int>& session_fds, pid_t launcher_pid, int launcher_pidfd,
                  const std::vector<int>& runner_pidfds) {
  std::vector<int> fds{launcher_pidfd};
  fds.insert(fds.end(), runner_pidfds.begin(), runner_pidfds.end());
  fds.insert(fds.end(), session_fds.begin(), session_fds.end());
  const json answer{{"type", "Started"}, {"launcher", launcher_pid}, {"runners", runner_pidfds.size()}};
  ipc::send(socket, answer.dump(), fds);
}

void send_failed(int socket, const std::exception& error) {
  const auto failed = describe(error);
  const json answer{{"type", failed.type},
                    {"what", failed.what},
                    {"key", failed.key},
                    {"rank", failed.rank},
                    {"phase", failed.phase}};
  ipc::send(socket, answer.dump(-1, ' ', false, json::error_handler_t::replace));
}

std::variant<Started, Failed> receive_answer(int socket, base::Deadline deadline) {
  auto message = receive(socket, deadline, "manager");
  const auto answer = json::parse(message.bytes);
  if (answer.at("type") != "Started")
    return Failed{answer.at("type"), answer.at("what"), answer.at("key"), answer.at("rank"),
                  answer.at("phase")};
  Started started;
  const auto runners = answer.at("runners").get<std::size_t>();
  if (message.fds.size() < 2 + runners)
    throw SessionError(
        fmt::format("the manager passed {} descriptors for {} runners", message.fds.size(), runners));
  started.launcher_pid = answer.at("launcher");
  auto fd = message.fds.begin();
  started.launcher_pidfd = std::move(*fd++);
  for (std::size_t i = 0; i < runners; ++i) started.runner_pidfds.push_back(std::move(*fd++));
  for (; fd != message.fds.end(); ++fd) started.session.push_back(std::move(*fd));
  return started;
}

void raise(const Failed& failed) {
  if (failed.type == "ConfigError") throw ConfigError(failed.what, failed.key);
  if (failed.type == "RunnerError") throw RunnerError(failed.what, failed.rank, failed.phase);
  if (failed.type == "ModelError") throw ModelError(failed.what);
  if (failed.type == "DataError") throw DataError(failed.what);
  if (failed.type == "SessionError") throw SessionError(failed.what);
  if (failed.type == "UsageError") throw UsageError(failed.what);
  throw Error(failed.what);
}

void send_stop(int socket) noexcept {
  try {
    ipc::send(socket, "stop");
  } catch (const Error&) {
    // The manager has ended already: what stop() asks for.
  }
}

}  // namespace accelmgr::protocol
