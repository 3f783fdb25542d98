#include "engine/protocol/messages.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "base/fnv1a.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/socket.hpp"
#include "base/refusals.hpp"
#include "base/timing.hpp"
#include "base/utf8.hpp"
#include "engine/session/layout.hpp"
#include "engine/session/step_word.hpp"

namespace accelmgr::protocol {
namespace {

using nlohmann::json;

constexpr const char* failures[] = {"Error",     "ConfigError",  "RunnerError", "ModelError",
                                    "DataError", "SessionError", "UsageError",  "CheckpointError"};
constexpr const char* tenures[] = {"of_host", "of_service"};

struct Free {
  static constexpr const char* name = "Free";
};
struct Noted {
  static constexpr const char* name = "Noted";
};

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

/// "Leave, Resize or Save"
std::string one_of(const auto& names) {
  const auto last = std::prev(std::end(names));
  const auto others = fmt::format("{}", fmt::join(std::begin(names), last, ", "));
  return others.empty() ? *last : fmt::format("{} or {}", others, *last);
}

template <typename T, typename Message>
concept Is = std::same_as<std::remove_const_t<T>, Message>;

// The fields of each message, once: a Writer sends them, a Reader checks and takes them.

void each_field(auto&, Is<Free> auto&) {}
void each_field(auto&, Is<Noted> auto&) {}
void each_field(auto&, Is<Leave> auto&) {}
void each_field(auto& io, Is<Resize> auto& m) { io("ranks", m.ranks, 1, session::max_ranks); }
void each_field(auto& io, Is<Save> auto& m) {
  io("step", m.step);
  for (auto* fd : {&m.model, &m.training, &m.description}) io.fd(*fd);
  io.optional_fd(m.lock);
}
void each_field(auto& io, Is<Joined> auto& m) {
  io("rank", m.rank, 0, session::max_ranks - 1);
  io("generation", m.generation);
  io("pid", m.pid, 2);
  io.fd(m.pidfd);
}
void each_field(auto& io, Is<Relaunched> auto& m) { io.fd(m.pidfd); }
void each_field(auto& io, Is<Resized> auto& m) { io("refused", m.refused); }
void each_field(auto& io, Is<Saved> auto& m) {
  io("step", m.step);
  io("path", m.path);
  io("bytes", m.bytes);
  io("write_ms", m.write_ms);
  io("error", m.error);
  io("warnings", m.warnings);
}
void each_field(auto& io, Is<Begin> auto& m) {
  io.file("configuration_bytes", m.configuration);
  io("reads_again", m.reads_again);
  io.session(m.session, 0);
}
void each_field(auto& io, Is<Opening> auto& m) {
  io.choice("tenure", m.tenure, tenures);
  io("lease", m.lease, std::uint64_t{1});
  io("needs_values", m.needs_values);
  io("run_id", m.run_id);
  io("unfinished", m.unfinished);
  io("pending_steps", m.pending_steps, 0);
  io("checkpoint", m.checkpoint);
  if (!m.checkpoint.empty())
    for (auto* fd : {&m.state, &m.training}) io.fd(*fd);
  io.file("configuration_bytes", m.configuration);
  io.session(m.session, m.tenure == Tenure::of_service ? 1 : 0);
}
void each_field(auto& io, Is<Started> auto& m) {
  io.fd(m.fork_server_pidfd);
  io.objects("runners", m.runners, session::max_ranks);
}
void each_field(auto& io, Is<Failed> auto& m) {
  io.choice("error", m.type, failures);
  io("what", m.what);
  io("key", m.key);
  io("rank", m.rank, -1, session::max_ranks - 1);
  io("phase", m.phase);
}

/// A message in the form in which it is sent.
class Writer {
 public:
  template <typename Message>
  static Writer of(const Message& message) {
    Writer writer;
    writer.text["type"] = Message::name;
    each_field(writer, message);
    return writer;
  }

  void operator()(const char* name, const auto& value, auto...) { text[name] = value; }
  void choice(const char* name, Tenure tenure, const auto& names) {
    text[name] = names[static_cast<std::size_t>(tenure)];
  }
  void choice(const char* name, const std::string& value, const auto&) { text[name] = value; }
  void fd(const base::UniqueFd& fd) { fds.push_back(fd.get()); }
  void optional_fd(const base::UniqueFd& fd) {
    if (fd) this->fd(fd);
  }
  void session(const std::vector<base::UniqueFd>& session, std::size_t) {
    for (const auto& one : session) fd(one);
  }
  /// A text that may be longer than a socket holds, while nobody reads there.
  void file(const char* name, const std::string& contents) {
    const auto room = std::max<std::size_t>(contents.size(), 1);
    const auto& file = files_.emplace_back(ipc::create_memfd("accelmgr-configuration", room));
    const ipc::Mapping map(file.get(), 0, room, ipc::Access::read_write);
    std::memcpy(map.data(), contents.data(), contents.size());
    text[name] = contents.size();
    fd(file);
  }
  void objects(const char* name, const auto& objects, std::size_t) {
    auto list = json::array();
    for (const auto& object : objects) {
      Writer part;
      each_field(part, object);
      list.push_back(std::move(part.text));
      fds.insert(fds.end(), part.fds.begin(), part.fds.end());
    }
    text[name] = std::move(list);
  }

  json text = json::object();
  std::vector<int> fds{};

 private:
  std::vector<base::UniqueFd> files_;
};

/// Takes a message in, and throws SessionError for what is not as it must be.
class Reader {
 public:
  Reader(const ipc::Message& message, const char* what)
      : what_(what), text_(base::parse_json(message.bytes, what)), fields_(text_, what) {}

  const base::Fields& fields() const noexcept { return fields_; }
  /// The message, which is one of these.
  template <typename... Messages>
  std::variant<Messages...> take(ipc::Message& message) {
    const auto type = fields_.text("type");
    std::optional<std::variant<Messages...>> taken;
    const auto take_as = [&]<typename Message>(Message one) {
      if (type != Message::name) return;
      each_field(*this, one);
      pass(message);
      taken = std::move(one);
    };
    // each_field() notes the addresses of descriptor fields, so the message must not move before pass().
    (take_as(Messages{}), ...);
    if (!taken) fields_.refuse("type", one_of(std::initializer_list<const char*>{Messages::name...}));
    return std::move(*taken);
  }

  void operator()(const char* name, std::string& value) { value = fields_.text(name); }
  void operator()(const char* name, std::vector<std::string>& value) { value = fields_.texts(name); }
  void operator()(const char* name, double& value) { value = fields_.real(name); }
  void operator()(const char* name, bool& value) { value = fields_.flag(name); }
  template <std::integral T>
  void operator()(const char* name, T& value, T least = std::numeric_limits<T>::min(),
                  T most = std::numeric_limits<T>::max()) {
    value = fields_.number<T>(name, least, most);
  }
  void choice(const char* name, Tenure& tenure, const auto& names) {
    std::string value;
    choice(name, value, names);
    tenure = static_cast<Tenure>(std::ranges::find(names, value) - std::begin(names));
  }
  void choice(const char* name, std::string& value, const auto& names) {
    value = fields_.text(name);
    if (std::ranges::find(names, value) == std::end(names)) fields_.refuse(name, one_of(names));
  }
  void fd(base::UniqueFd& fd) { fds_.push_back(&fd); }
  void optional_fd(base::UniqueFd& fd) { optional_fd_ = &fd; }
  void session(std::vector<base::UniqueFd>& session, std::size_t least) {
    session_ = &session;
    least_session_fds_ = least;
  }
  void file(const char* name, std::string& contents) {
    file_bytes_ = fields_.number<std::size_t>(name);
    contents_ = &contents;
    fd(file_);
  }
  template <typename Object>
  void objects(const char* name, std::vector<Object>& objects, std::size_t most) {
    const auto parts = fields_.objects(name, most);
    objects.resize(parts.size());
    const auto whole = fields_;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      fields_ = parts[i];
      each_field(*this, objects[i]);
    }
    fields_ = whole;
  }

 private:
  /// Puts the descriptors of the message where the fields say.
  void pass(ipc::Message& message) {
    if (!message.missing.empty()) return;
    const auto count = message.fds.size();
    const auto least = fds_.size() + (session_ != nullptr ? least_session_fds_ : 0);
    const auto most = fds_.size() + (session_ != nullptr ? max_session_fds : optional_fd_ != nullptr ? 1 : 0);
    if (count < least || count > most)
      throw SessionError(
          fmt::format("{} came with {} descriptors; it must come with {}", what_, count,
                      least == most ? std::to_string(least) : fmt::format("{} to {}", least, most)));
    auto next = message.fds.begin();
    for (auto* fd : fds_) *fd = std::move(*next++);
    if (optional_fd_ != nullptr && next != message.fds.end()) *optional_fd_ = std::move(*next++);
    if (session_ != nullptr)
      session_->assign(std::move_iterator(next), std::move_iterator(message.fds.end()));
    if (contents_ == nullptr) return;
    const std::string file = "the configuration in " + what_;
    if (const auto bytes = ipc::sealed_bytes(file_.get(), file); file_bytes_ > bytes)
      throw SessionError(fmt::format("{} has {} bytes; {} were announced", file, bytes, file_bytes_));
    const ipc::Mapping map(file_.get(), 0, std::max<std::size_t>(file_bytes_, 1), ipc::Access::read);
    contents_->assign(reinterpret_cast<const char*>(map.data()), file_bytes_);
  }

  /// A session has a descriptor for its memory and one for the slab of each rank.
  static constexpr std::size_t max_session_fds = 1 + session::max_ranks;

  std::string what_;
  json text_;
  base::Fields fields_;
  std::vector<base::UniqueFd*> fds_;
  base::UniqueFd* optional_fd_ = nullptr;
  std::vector<base::UniqueFd>* session_ = nullptr;
  std::size_t least_session_fds_ = 0;
  base::UniqueFd file_;
  std::size_t file_bytes_ = 0;
  std::string* contents_ = nullptr;
};

/// Blocks for the next message, which is one of these.
template <typename... Messages>
std::variant<Messages...> receive(int socket, base::Deadline deadline, const char* who, const char* what) {
  auto message = ipc::receive(socket, deadline);
  if (!message) throw SessionError(fmt::format("the {} closed its socket before it answered", who));
  return Reader(*message, what).take<Messages...>(*message);
}

template <typename Message>
void send(int socket, const Message& message, const std::vector<int>& session = {},
          base::Deadline deadline = base::Deadline::in_seconds(timing::send_s)) {
  auto writer = Writer::of(message);
  writer.fds.insert(writer.fds.end(), session.begin(), session.end());
  ipc::send(socket, text_of_packet(std::move(writer.text)), writer.fds, deadline);
}

}  // namespace

std::uint64_t build_fingerprint() noexcept {
  return base::fnv1a({session::build_fingerprint(), messages_version, base::fnv1a(ACCELMGR_VERSION)});
}

void send_begin(int socket, const Begin& begin, const std::vector<int>& session) {
  send(socket, begin, session);
}

Begin receive_begin(int socket, base::Deadline deadline) {
  return std::get<0>(receive<Begin>(socket, deadline, "host", "the host's beginning"));
}

void send_free(int socket) { send(socket, Free{}); }

void receive_free(int socket, base::Deadline deadline) {
  receive<Free>(socket, deadline, "host", "the host's word that the session is free");
}

void send_opening(int socket, const Opening& opening, const std::vector<int>& session) {
  send(socket, opening, session, base::Deadline::at_ns(0));
}

void send_noted(int socket) { send(socket, Noted{}); }

void receive_noted(int socket, base::Deadline deadline) {
  receive<Noted>(socket, deadline, "host", "the host's word that it has the session");
}

void send_started(int socket, const Started& started) { send(socket, started); }

void send_failed(int socket, const std::exception& error) { send(socket, describe(error)); }

std::variant<Opening, Started, Failed> receive_answer(int socket, base::Deadline deadline) {
  return receive<Opening, Started, Failed>(socket, deadline, "manager", "the manager's answer");
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

void send_request(int socket, const Request& request, std::uint64_t lease) {
  auto packet = std::visit([](const auto& one) { return Writer::of(one); }, request);
  packet.text["lease"] = lease;
  ipc::send(socket, base::json_text(packet.text), packet.fds);
}

std::optional<Received> next_request(int socket, std::uint64_t lease) {
  if (!ipc::is_readable(socket)) return std::nullopt;
  try {
    auto message = ipc::receive_what_fits(socket, base::Deadline::at_ns(0));
    if (!message) return Closed{};
    Reader reader(*message, "a request of the host");
    if (const auto stated = reader.fields().number<std::uint64_t>("lease"); stated != lease)
      throw SessionError(fmt::format(
          "a request of the host with lease {}, which is not that of this host ({})", stated, lease));
    auto request = reader.take<Leave, Resize, Save>(*message);
    if (auto* save = std::get_if<Save>(&request)) save->missing = message->missing;
    return std::visit([](auto& one) -> Received { return std::move(one); }, request);
  } catch (const SessionError& error) {
    return Refused{error.what()};
  }
}

bool send_notice(int socket, const Notice& notice) {
  try {
    std::visit([&](const auto& one) { send(socket, one, {}, base::Deadline::at_ns(0)); }, notice);
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
      return Reader(*message, "a notice of the manager").take<Joined, Relaunched, Resized, Saved>(*message);
    } catch (const SessionError& error) {
      refusals.note(error.what());
    }
  }
  return std::nullopt;
}

}  // namespace accelmgr::protocol
