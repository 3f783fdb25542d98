#include "engine/client/service_socket.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "base/interruption.hpp"
#include "base/ipc/wait_ready.hpp"
#include "base/timing.hpp"

namespace accelmgr::client {
namespace {

constexpr std::size_t most_header_bytes = 16 * 1024, most_body_bytes = 4 * 1024 * 1024,
                      part_bytes = 64 * 1024;

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path)
    throw SessionError(fmt::format("the path of a service's socket must have 1 to {} characters; '{}' has {}",
                                   sizeof address.sun_path - 1, path, path.size()));
  path.copy(address.sun_path, path.size());
  return address;
}

ipc::Child peer_of(int socket, const std::string& path) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.pid <= 0)
    throw SessionError(fmt::format("which process serves '{}' cannot be seen from here", path));
  return {peer.pid, ipc::open_pidfd(peer.pid)};
}

/// The value of a line of the header; `name` is in lower case.
std::optional<std::string> value_of(const std::string& header, std::string_view name) {
  for (std::size_t at = header.find("\r\n"); at != std::string::npos; at = header.find("\r\n", at + 2)) {
    const auto line = std::string_view(header).substr(at + 2, header.find("\r\n", at + 2) - at - 2);
    if (line.size() <= name.size() || line[name.size()] != ':') continue;
    bool same = true;
    for (std::size_t i = 0; i < name.size(); ++i)
      same = same && std::tolower(static_cast<unsigned char>(line[i])) == name[i];
    if (!same) continue;
    auto value = line.substr(name.size() + 1);
    while (!value.empty() && value.front() == ' ') value.remove_prefix(1);
    return std::string(value);
  }
  return std::nullopt;
}

nlohmann::json error_of(const ServiceAnswer& answer) {
  const auto body = nlohmann::json::parse(answer.body, nullptr, /*allow_exceptions=*/false);
  return body.is_object() && body.contains("error") && body["error"].is_object() ? body["error"]
                                                                                 : nlohmann::json::object();
}

std::string text_in(const nlohmann::json& object, const char* field) {
  const auto found = object.find(field);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

}  // namespace

ServiceSocket ServiceSocket::connect(const std::string& path, base::Deadline deadline) {
  const auto address = address_of(path);
  base::UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw SystemError("socket", errno);
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    const int error = errno;
    if (error == EINTR) continue;
    if (error != EAGAIN)
      throw SessionError(fmt::format("no service can be reached at '{}': {}", path, std::strerror(error)));
    if (deadline.passed() || base::interrupted())
      throw SessionError(fmt::format("the service at '{}' accepts no connection", path));
    const timespec look{.tv_sec = 0,
                        .tv_nsec = timing::look_ns};  // Its queue is full, which no descriptor tells.
    nanosleep(&look, nullptr);
  }
  auto service = peer_of(fd.get(), path);
  return {path, std::move(fd), std::move(service)};
}

// A child of the service's user code may hold the connection open after the service's end.
ServiceSocket::Waited ServiceSocket::wait(short events, base::Deadline deadline) const {
  for (;;) {
    const auto soon = base::Deadline::at_ns(std::min(deadline.ns(), base::now_ns() + timing::look_ns));
    pollfd entries[] = {{.fd = service_.pidfd.get(), .events = POLLIN, .revents = 0},
                        {.fd = fd_.get(), .events = events, .revents = 0}};
    if (ipc::wait_any(entries, soon)) {
      // What it sent before its end was there when its end was seen.
      const bool ended = entries[0].revents != 0;
      return ended && ipc::wait_ready(fd_.get(), events, base::Deadline::at_ns(0)) == 0
                 ? Waited::service_ended
                 : Waited::ready;
    }
    if (deadline.passed()) return Waited::deadline;
    if (base::interrupted())
      throw SessionError(fmt::format("interrupted before the service at '{}' answered", path_));
  }
}

void ServiceSocket::send(std::string_view text, base::Deadline deadline) {
  while (!text.empty()) {
    const auto sent = ::send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      text.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN) {
      const auto waited = wait(POLLOUT, deadline);
      if (waited == Waited::service_ended) return;  // It may have answered before.
      if (waited == Waited::deadline)
        throw SessionError(fmt::format("the service at '{}' does not read", path_));
    } else if (errno == EPIPE || errno == ECONNRESET) {
      return;  // It may have answered before it closed.
    } else if (errno != EINTR) {
      throw SystemError("sending to a service", errno);
    }
  }
}

/// Returns 0 at the end of the stream, or when the service has ended and all is read.
std::size_t ServiceSocket::receive(std::span<char> to, base::UniqueFd& passed, base::Deadline deadline) {
  for (;;) {
    iovec data{.iov_base = to.data(), .iov_len = to.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    const auto received = recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (received >= 0) {
      const auto* part = CMSG_FIRSTHDR(&header);
      if (part != nullptr && part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(part), sizeof fd);
        passed = base::UniqueFd(fd);
      }
      return static_cast<std::size_t>(received);
    }
    if (errno == ECONNRESET) return 0;
    if (errno == EINTR) continue;
    if (errno != EAGAIN) throw SystemError("receiving from a service", errno);
    const auto waited = wait(POLLIN, deadline);
    if (waited == Waited::service_ended) return 0;
    if (waited == Waited::deadline)
      throw SessionError(fmt::format("the service at '{}' did not answer in time", path_));
  }
}

ServiceAnswer ServiceSocket::begin(const std::string& method, const std::string& target,
                                   const std::string& head, const std::string& body, std::string& header,
                                   base::Deadline deadline) {
  send(fmt::format("{} {} HTTP/1.1\r\nHost: accelmgr\r\nContent-Length: {}\r\n{}\r\n{}", method, target,
                   body.size(), head, body),
       deadline);
  ServiceAnswer answer;
  std::string text;
  std::size_t header_end = std::string::npos;
  std::vector<char> part(part_bytes);
  while (header_end == std::string::npos) {
    const auto received = receive(part, answer.fd, deadline);
    if (received == 0) throw SessionError(fmt::format("the service at '{}' closed the connection", path_));
    text.append(part.data(), received);
    header_end = text.find("\r\n\r\n");
    if (header_end == std::string::npos && text.size() > most_header_bytes)
      throw SessionError(fmt::format("what answers at '{}' is no service: its header has no end", path_));
  }
  header = text.substr(0, header_end);
  constexpr std::size_t status_at = 9;  // "HTTP/1.1 200 OK"
  const auto* digits = header.data() + std::min(status_at, header.size());
  if (!header.starts_with("HTTP/1.") ||
      std::from_chars(digits, header.data() + header.size(), answer.status).ec != std::errc{})
    throw SessionError(fmt::format("what answers at '{}' does not speak HTTP", path_));
  answer.body = text.substr(header_end + 4);
  return answer;
}

void ServiceSocket::read_body(const std::string& header, ServiceAnswer& answer, base::Deadline deadline) {
  std::size_t length = 0;
  const auto stated = value_of(header, "content-length").value_or("0");
  if (std::from_chars(stated.data(), stated.data() + stated.size(), length).ec != std::errc{} ||
      length > most_body_bytes)
    throw SessionError(fmt::format("the answer of the service at '{}' states {} bytes", path_, stated));
  std::vector<char> part(part_bytes);
  while (answer.body.size() < length) {
    const auto received = receive(part, answer.fd, deadline);
    if (received == 0) throw SessionError(fmt::format("the service at '{}' closed the connection", path_));
    answer.body.append(part.data(), received);
  }
}

ServiceAnswer ServiceSocket::ask(const std::string& method, const std::string& target,
                                 const std::string& head, const std::string& body, base::Deadline deadline) {
  std::string header;
  auto answer = begin(method, target, head, body, header, deadline);
  if (answer.status != 101) read_body(header, answer, deadline);
  return answer;
}

ServiceAnswer ServiceSocket::follow(const std::string& target, const std::string& head,
                                    base::Deadline deadline,
                                    const std::function<void(std::string_view)>& take) {
  std::string header;
  auto answer = begin("GET", target, head, "", header, deadline);
  if (answer.status != 200) {
    read_body(header, answer, deadline);
    return answer;
  }
  take(answer.body);
  answer.body.clear();
  std::vector<char> part(part_bytes);
  const auto ever = base::Deadline::in_seconds(std::numeric_limits<double>::infinity());
  while (const auto received = receive(part, answer.fd, ever)) take({part.data(), received});
  return answer;
}

std::string error_code(const ServiceAnswer& answer) { return text_in(error_of(answer), "code"); }

std::string error_text(const ServiceAnswer& answer) {
  const auto error = error_of(answer);
  const auto message = text_in(error, "message"), hint = text_in(error, "hint");
  if (message.empty()) return fmt::format("status {}", answer.status);
  return hint.empty() ? message : fmt::format("{}; {}", message, hint);
}

}  // namespace accelmgr::client
