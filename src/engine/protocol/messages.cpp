#include "engine/protocol/messages.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "base/fnv1a.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/socket.hpp"
#include "base/refusals.hpp"
#include "base/utf8.hpp"
#include "engine/session/layout.hpp"
#include "engine/session/step_word.hpp"

namespace accelmgr::protocol {
namespace {

using nlohmann::json;

constexpr const char* begin_text = "Begin";
constexpr const char* free_text = "Free";
constexpr const char* noted_text = "Noted";
constexpr const char* failures[] = {"Error",     "ConfigError",  "RunnerError", "ModelError",
                                    "DataError", "SessionError", "UsageError",  "CheckpointError"};

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

void check_fds(const ipc::Message& message, const char* what, std::size_t least, std::size_t most) {
  const auto count = message.fds.size();
  if (count < least || count > most)
    throw SessionError(
        fmt::format("{} came with {} descriptors; it must come with {}", what, count,
                    least == most ? std::to_string(least) : fmt::format("{} to {}", least, most)));
}

/// A session has a descriptor for its memory and one for the slab of each rank.
constexpr std::size_t max_session_fds = 1 + session::max_ranks;

json describe(const Joined& runner) {
  return {{"rank", runner.rank}, {"generation", runner.generation}, {"pid", runner.pid}};
}

Joined joined(const base::Fields& runner, base::UniqueFd pidfd) {
  return {.rank = runner.number<int>("rank", 0, session::max_ranks - 1),
          .generation = runner.number<std::uint32_t>("generation"),
          .pid = runner.number<pid_t>("pid", 2),
          .pidfd = std::move(pidfd)};
}

/// A message in the form in which it is sent.
struct Packet {
  json text;
  std::vector<int> fds{};
};

/// `text` without its middle, if it has more than `most` bytes.
std::string shortened(const std::string& text, std::size_t most) {
  if (text.size() <= most) return text;
  const auto half = most / 2;
  return fmt::format("{}\n... {} bytes are left out here ...\n{}", base::valid_utf8(text.substr(0, half)),
                     text.size() - 2 * half, base::valid_utf8(text.substr(text.size() - half)));
}

/// Shortens each text, and each list of texts, to about `most` bytes.
void shorten(json& value, std::size_t most) {
  if (value.is_string()) value = shortened(value.get_ref<const std::string&>(), most);
  if (!value.is_structured()) return;
  std::size_t bytes = 0, kept = 0;
  for (auto& part : value) {
    shorten(part, most);
    if (part.is_string()) bytes += part.get_ref<const std::string&>().size();
    if (bytes <= most) ++kept;
  }
  if (!value.is_array() || kept == value.size()) return;
  const auto left_out = value.size() - kept;
  value.erase(value.begin() + static_cast<std::ptrdiff_t>(kept), value.end());
  value.push_back(fmt::format("and {} more", left_out));
}

/// The text of a packet, shortened until it fits into one: an error may quote texts of any length.
std::string text_of_packet(json value) {
  auto text = base::json_text(value);
  for (auto most = ipc::max_packet_bytes / 2; text.size() > ipc::max_packet_bytes && most > 0; most /= 2) {
    shorten(value, most);
    text = base::json_text(value);
  }
  return text;
}

Packet pack(const Leave&) { return {{{"type", "Leave"}}}; }
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
Packet pack(const Relaunched& fork_server) { return {{{"type", "Relaunched"}}, {fork_server.pidfd.get()}}; }
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

Received request_of(ipc::Message& message, std::uint64_t lease) {
  constexpr const char* what = "a request of the host";
  const auto text = base::parse_json(message.bytes, what);
  const base::Fields fields(text, what);
  const auto type = fields.text("type");
  if (const auto stated = fields.has("lease") ? fields.number<std::uint64_t>("lease") : 0; stated != lease)
    throw SessionError(fmt::format("a request of the host with lease {}, which is not that of this host ({})",
                                   stated, lease));
  if (type == "Leave") return Leave{};
  if (type == "Resize") return Resize{fields.number<int>("ranks", 1, session::max_ranks)};
  if (type != "Save") fields.refuse("type", "Leave, Resize or Save");
  Save save;
  save.step = fields.number<std::uint64_t>("step");
  save.missing = message.missing;
  if (!save.missing.empty()) return save;
  check_fds(message, "a Save of the host", 3, 4);
  auto& fds = message.fds;
  save.model = std::move(fds[0]);
  save.training = std::move(fds[1]);
  save.description = std::move(fds[2]);
  if (fds.size() == 4) save.lock = std::move(fds[3]);
  return save;
}

Notice notice_of(ipc::Message& message) {
  constexpr const char* what = "a notice of the manager";
  const auto text = base::parse_json(message.bytes, what);
  const base::Fields fields(text, what);
  const auto type = fields.text("type");
  if (type == "Resized") return Resized{fields.text("refused")};
  if (type == "Saved")
    return Saved{.step = fields.number<std::uint64_t>("step"),
                 .path = fields.text("path"),
                 .bytes = fields.number<std::uint64_t>("bytes"),
                 .write_ms = fields.real("write_ms"),
                 .error = fields.text("error"),
                 .warnings = fields.texts("warnings")};
  if (type != "Joined" && type != "Relaunched") fields.refuse("type", "Joined, Relaunched, Resized or Saved");
  check_fds(message, what, 1, 1);
  if (type == "Joined") return joined(fields, std::move(message.fds[0]));
  return Relaunched{std::move(message.fds[0])};
}

Assigned assigned_of(const base::Fields& fields) {
  Assigned assigned{.nprocs = fields.number<int>("nprocs", 1, session::max_ranks),
                    .device = fields.text("device"),
                    .devices = fields.texts("devices")};
  const auto& device = assigned.device;
  if (device != "cpu" && device != "cuda" && device != "xla" && device != "accelerator")
    fields.refuse("device", "cpu, cuda, xla or accelerator");
  return assigned;
}

Started started_of(const base::Fields& fields, ipc::Message& message) {
  const auto runners = fields.objects("runners", session::max_ranks);
  check_fds(message, "the manager's Started", 1 + runners.size(), 1 + runners.size());
  Started started{.fork_server_pidfd = std::move(message.fds[0]), .runners = {}};
  for (std::size_t i = 0; i < runners.size(); ++i)
    started.runners.push_back(joined(runners[i], std::move(message.fds[1 + i])));
  return started;
}

}  // namespace

std::uint64_t build_fingerprint() noexcept {
  return base::fnv1a({session::build_fingerprint(), messages_version, base::fnv1a(ACCELMGR_VERSION)});
}

void send_configuration(int socket, const std::string& yaml) { ipc::send_text(socket, yaml); }

std::string receive_configuration(int socket, base::Deadline deadline) {
  auto text = ipc::receive_text(socket, deadline);
  if (!text) throw SessionError("the peer ended before it sent a configuration");
  return *text;
}

void send_begin(int socket, const std::vector<int>& session) { ipc::send(socket, begin_text, session); }

std::vector<base::UniqueFd> receive_begin(int socket, base::Deadline deadline) {
  auto message = receive(socket, deadline, "host");
  if (message.bytes != begin_text) throw SessionError("expected Begin from the host, got another message");
  check_fds(message, "Begin", 0, max_session_fds);
  return std::move(message.fds);
}

void send_free(int socket) { ipc::send(socket, free_text); }

void receive_free(int socket, base::Deadline deadline) {
  if (receive(socket, deadline, "host").bytes != free_text)
    throw SessionError("expected the host to say that the session is free, got another message");
}

void send_prepared(int socket, const std::vector<int>& session, bool needs_values, base::Deadline deadline) {
  ipc::send(socket, base::json_text({{"type", "Prepared"}, {"needs_values", needs_values}}), session);
  if (receive(socket, deadline, "host").bytes != noted_text)
    throw SessionError("expected the host to confirm that it has the session, got another message");
}

void send_assigned(int socket, const Assigned& assigned) {
  ipc::send(socket, base::json_text({{"type", "Assigned"},
                                     {"nprocs", assigned.nprocs},
                                     {"device", assigned.device},
                                     {"devices", assigned.devices}}));
}

void take_note_of_prepared(int socket) { ipc::send(socket, noted_text); }

void send_started(int socket, const Started& started) {
  std::vector<int> fds{started.fork_server_pidfd.get()};
  json runners = json::array();
  for (const auto& runner : started.runners) {
    runners.push_back(describe(runner));
    fds.push_back(runner.pidfd.get());
  }
  ipc::send(socket, base::json_text({{"type", "Started"}, {"runners", runners}}), fds);
}

void send_failed(int socket, const std::exception& error) {
  const auto failed = describe(error);
  ipc::send(socket, text_of_packet({{"type", failed.type},
                                    {"what", failed.what},
                                    {"key", failed.key},
                                    {"rank", failed.rank},
                                    {"phase", failed.phase}}));
}

std::variant<Assigned, Prepared, Started, Failed> receive_answer(int socket, base::Deadline deadline) {
  auto message = receive(socket, deadline, "manager");
  constexpr const char* what = "the manager's answer";
  const auto text = base::parse_json(message.bytes, what);
  const base::Fields fields(text, what);
  const auto type = fields.text("type");
  if (type == "Prepared") {
    check_fds(message, "Prepared", 1, max_session_fds);
    return Prepared{std::move(message.fds), fields.flag("needs_values")};
  }
  if (type == "Assigned") return assigned_of(fields);
  if (type == "Started") return started_of(fields, message);
  if (std::find(std::begin(failures), std::end(failures), type) == std::end(failures))
    fields.refuse("type", fmt::format("Assigned, Prepared, Started, {}", fmt::join(failures, ", ")));
  return Failed{.type = type,
                .what = fields.text("what"),
                .key = fields.text("key"),
                .rank = fields.number<int>("rank", -1, session::max_ranks - 1),
                .phase = fields.text("phase")};
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

// The configuration may be longer than a socket holds, and the host has not begun to read: it goes as a
// memfd.
void send_attached(int socket, const Attached& attached, const std::vector<int>& session) {
  const auto& text = attached.configuration;
  const auto configuration =
      ipc::create_memfd("accelmgr-configuration", std::max<std::size_t>(text.size(), 1));
  const ipc::Mapping map(configuration.get(), 0, std::max<std::size_t>(text.size(), 1),
                         ipc::Access::read_write);
  std::memcpy(map.data(), text.data(), text.size());
  auto fds = session;
  if (!attached.checkpoint.empty()) fds.insert(fds.end(), {attached.state.get(), attached.training.get()});
  fds.push_back(configuration.get());
  ipc::send(socket,
            base::json_text({{"type", "Attached"},
                             {"lease", attached.lease},
                             {"run_id", attached.run_id},
                             {"unfinished", attached.unfinished},
                             {"pending_steps", attached.pending_steps},
                             {"checkpoint", attached.checkpoint},
                             {"configuration_bytes", text.size()}}),
            fds, base::Deadline::at_ns(0));
}

Attached receive_attached(int socket, base::Deadline deadline) {
  auto message = receive(socket, deadline, "service");
  constexpr const char* what = "the service's answer";
  const auto text = base::parse_json(message.bytes, what);
  const base::Fields fields(text, what);
  if (fields.text("type") != "Attached") fields.refuse("type", "Attached");
  const auto checkpoint = fields.text("checkpoint");
  const std::size_t files = checkpoint.empty() ? 0 : 2;
  check_fds(message, what, 2 + files, max_session_fds + 1 + files);
  const auto take = [&] {
    auto last = std::move(message.fds.back());
    message.fds.pop_back();
    return last;
  };
  const auto configuration = take();
  base::UniqueFd training, state;
  if (files != 0) training = take(), state = take();
  const auto bytes = fields.number<std::size_t>(
      "configuration_bytes", 0, ipc::sealed_bytes(configuration.get(), "the configuration of the service"));
  const ipc::Mapping map(configuration.get(), 0, std::max<std::size_t>(bytes, 1), ipc::Access::read);
  return {.configuration = std::string(reinterpret_cast<const char*>(map.data()), bytes),
          .lease = fields.number<std::uint64_t>("lease", 1),
          .run_id = fields.text("run_id"),
          .unfinished = fields.text("unfinished"),
          .pending_steps = fields.number<int>("pending_steps", 0),
          .session = std::move(message.fds),
          .checkpoint = checkpoint,
          .state = std::move(state),
          .training = std::move(training)};
}

void send_request(int socket, const Request& request, std::uint64_t lease) {
  auto packet = std::visit([](const auto& r) { return pack(r); }, request);
  if (lease != 0) packet.text["lease"] = lease;
  ipc::send(socket, base::json_text(packet.text), packet.fds);
}

std::optional<Received> next_request(int socket, std::uint64_t lease) {
  if (!ipc::is_readable(socket)) return std::nullopt;
  try {
    auto message = ipc::receive_what_fits(socket, base::Deadline::at_ns(0));
    if (!message) return Closed{};
    return request_of(*message, lease);
  } catch (const SessionError& error) {
    return Refused{error.what()};
  }
}

bool send_notice(int socket, const Notice& notice) {
  const auto packet = std::visit([](const auto& n) { return pack(n); }, notice);
  try {
    ipc::send(socket, text_of_packet(packet.text), packet.fds, base::Deadline::at_ns(0));
    return true;
  } catch (const SessionError&) {
    return false;
  }
}

std::optional<Notice> next_notice(int socket) {
  constexpr int most_at_once = 64;  // Bounds the time that a flood of invalid messages takes the caller.
  static thread_local base::Refusals refusals;
  for (int i = 0; i < most_at_once && ipc::is_readable(socket); ++i) {
    try {
      auto message = ipc::receive(socket, base::Deadline::at_ns(0));
      if (!message) return std::nullopt;
      return notice_of(*message);
    } catch (const SessionError& error) {
      refusals.note(error.what());
    }
  }
  return std::nullopt;
}

}  // namespace accelmgr::protocol
