#include "protocol/messages.hpp"

#include <fmt/format.h>

#include <cerrno>
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
  } else if (dynamic_cast<const CheckpointError*>(&error) != nullptr) {
    failed.type = "CheckpointError";
  }
  return failed;
}

ipc::Message receive(int socket, base::Deadline deadline, const char* who) {
  auto message = ipc::receive(socket, deadline);
  if (!message) throw SessionError(fmt::format("the {} closed its socket before it answered", who));
  return std::move(*message);
}

std::string text_of(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

void check_fds(const ipc::Message& message, std::size_t needed) {
  if (message.fds.size() != needed)
    throw SessionError(
        fmt::format("a message came with {} descriptors instead of {}", message.fds.size(), needed));
}

json describe(const Joined& runner) {
  return {{"rank", runner.rank}, {"generation", runner.generation}, {"pid", runner.pid}};
}

Joined joined(const json& runner, base::UniqueFd pidfd) {
  return {runner.at("rank"), runner.at("generation"), runner.at("pid"), std::move(pidfd)};
}

/// A packet: text and descriptors.
struct Packet {
  json text;
  std::vector<int> fds{};
};

Packet pack(const Stop&) { return {{{"type", "Stop"}}}; }
Packet pack(const Resize& resize) { return {{{"type", "Resize"}, {"ranks", resize.ranks}}}; }
Packet pack(const Save& save) {
  Packet packet{{{"type", "Save"}, {"step", save.step}},
                {save.model.get(), save.training.get(), save.description.get()}};
  if (save.lock) packet.fds.push_back(save.lock.get());
  return packet;
}
Packet pack(const Joined& runner) {
  auto text = describe(runner);
  text["type"] = "Joined";
  return {text, {runner.pidfd.get()}};
}
Packet pack(const Relaunched& launcher) { return {{{"type", "Relaunched"}}, {launcher.pidfd.get()}}; }
Packet pack(const Resized& resized) { return {{{"type", "Resized"}, {"refused", resized.refused}}}; }
Packet pack(const Saved& saved) {
  return {{{"type", "Saved"},
           {"step", saved.step},
           {"path", saved.path},
           {"bytes", saved.bytes},
           {"write_ms", saved.write_ms},
           {"error", saved.error},
           {"warnings", saved.warnings}}};
}

/// The next message that is there; nullopt when there is none or the peer is gone (`gone`).
std::optional<ipc::Message> next(int socket, bool& gone) {
  gone = false;
  if (!ipc::is_readable(socket)) return std::nullopt;
  auto message = ipc::receive(socket, base::Deadline::at_ns(0));
  gone = !message;
  return message;
}

}  // namespace

void send_configuration(int socket, const std::string& yaml) { ipc::send_text(socket, yaml); }

std::string receive_configuration(int socket, base::Deadline deadline) {
  auto text = ipc::receive_text(socket, deadline);
  if (!text) throw SessionError("the peer ended before it sent a configuration");
  return *text;
}

void send_begin(int socket, const std::vector<int>& session) { ipc::send(socket, "Begin", session); }

std::vector<base::UniqueFd> receive_begin(int socket, base::Deadline deadline) {
  return receive(socket, deadline, "host").fds;
}

void send_prepared(int socket, const std::vector<int>& session, base::Deadline deadline) {
  ipc::send(socket, text_of({{"type", "Prepared"}}), session);
  receive(socket, deadline, "host");
}

void take_note_of_prepared(int socket) { ipc::send(socket, "Noted"); }

void send_started(int socket, const Started& started) {
  std::vector<int> fds{started.launcher_pidfd.get()};
  json runners = json::array();
  for (const auto& runner : started.runners) {
    runners.push_back(describe(runner));
    fds.push_back(runner.pidfd.get());
  }
  ipc::send(socket, text_of({{"type", "Started"}, {"runners", runners}}), fds);
}

void send_failed(int socket, const std::exception& error) {
  const auto failed = describe(error);
  ipc::send(socket, text_of({{"type", failed.type},
                             {"what", failed.what},
                             {"key", failed.key},
                             {"rank", failed.rank},
                             {"phase", failed.phase}}));
}

std::variant<Prepared, Started, Failed> receive_answer(int socket, base::Deadline deadline) {
  auto message = receive(socket, deadline, "manager");
  const auto answer = json::parse(message.bytes);
  if (answer.at("type") == "Prepared") return Prepared{std::move(message.fds)};
  if (answer.at("type") != "Started")
    return Failed{answer.at("type"), answer.at("what"), answer.at("key"), answer.at("rank"),
                  answer.at("phase")};
  Started started;
  const auto& runners = answer.at("runners");
  check_fds(message, 1 + runners.size());
  auto fd = message.fds.begin();
  started.launcher_pidfd = std::move(*fd++);
  for (const auto& runner : runners) started.runners.push_back(joined(runner, std::move(*fd++)));
  return started;
}

void raise(const Failed& failed) {
  if (failed.type == "ConfigError") throw ConfigError(failed.what, failed.key);
  if (failed.type == "RunnerError") throw RunnerError(failed.what, failed.rank, failed.phase);
  if (failed.type == "ModelError") throw ModelError(failed.what);
  if (failed.type == "DataError") throw DataError(failed.what);
  if (failed.type == "SessionError") throw SessionError(failed.what);
  if (failed.type == "UsageError") throw UsageError(failed.what);
  if (failed.type == "CheckpointError") throw CheckpointError(failed.what);
  throw Error(failed.what);
}

void send_request(int socket, const Request& request) {
  const auto packet = std::visit([](const auto& r) { return pack(r); }, request);
  ipc::send(socket, text_of(packet.text), packet.fds);
}

std::optional<Request> next_request(int socket) {
  bool gone = false;
  std::optional<ipc::Message> message;
  try {
    message = next(socket, gone);
  } catch (const SystemError& error) {
    if (error.code() != EMFILE) throw;
    return Save{.step = json::parse(ipc::receive_bytes(socket)).at("step"),
                .model = {},
                .training = {},
                .description = {},
                .lock = {},
                .missing = error.what()};
  }
  if (gone) return Stop{};
  if (!message) return std::nullopt;
  const auto text = json::parse(message->bytes);
  const auto& type = text.at("type");
  if (type == "Resize") return Resize{text.at("ranks")};
  if (type != "Save") return Stop{};
  auto& fds = message->fds;
  auto lock = fds.size() == 4 ? std::move(fds.back()) : base::UniqueFd();
  if (lock) fds.pop_back();
  check_fds(*message, 3);
  return Save{text.at("step"), std::move(fds[0]), std::move(fds[1]), std::move(fds[2]), std::move(lock), {}};
}

bool send_notice(int socket, const Notice& notice) {
  const auto packet = std::visit([](const auto& n) { return pack(n); }, notice);
  try {
    ipc::send(socket, text_of(packet.text), packet.fds, base::Deadline::at_ns(0));
    return true;
  } catch (const SessionError&) {
    return false;
  }
}

std::optional<Notice> next_notice(int socket) {
  bool gone = false;
  auto message = next(socket, gone);
  if (!message) return std::nullopt;
  const auto text = json::parse(message->bytes);
  const auto& type = text.at("type");
  if (type == "Resized") return Resized{text.at("refused")};
  if (type == "Saved")
    return Saved{text.at("step"),     text.at("path"),  text.at("bytes"),
                 text.at("write_ms"), text.at("error"), text.at("warnings")};
  check_fds(*message, 1);
  if (type == "Joined") return joined(text, std::move(message->fds[0]));
  return Relaunched{std::move(message->fds[0])};
}

}  // namespace accelmgr::protocol
