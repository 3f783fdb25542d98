#include "engine/client/attached_manager.hpp"

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <utility>
#include <variant>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/errno_text.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/client/service_name.hpp"
#include "engine/client/service_socket.hpp"
#include "engine/session/layout.hpp"

namespace accelmgr::client {
namespace {

constexpr std::int64_t answer_ns = 1'000'000'000;

/// What a name may have in a line of a header.
std::string header_text(std::string_view name) {
  std::string text;
  for (const char c : name.substr(0, 64))
    if (c > ' ' && c < 127) text += c;
  return text;
}

/// Throws SessionError unless this process may open as many descriptors as an attached host has. One that the
/// service has admitted, but that cannot take them, would keep others out until it has ended.
void check_descriptors() {
  constexpr std::size_t needed =
      2 * session::max_ranks + 8;  // Memory and pidfd of each rank, and the others.
  std::vector<base::UniqueFd> fds;
  while (fds.size() < needed) {
    fds.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!fds.back())
      throw SessionError(
          fmt::format("attaching takes up to {} descriptors, but this process may open only {} "
                      "more: {}",
                      needed, fds.size() - 1, base::errno_text(errno)));
  }
}

/// Whether the service may admit this host soon.
bool passes(const ServiceAnswer& answer) {
  const auto code = error_code(answer);
  return code == "not_ready" || code == "host_is_ending";
}

}  // namespace

AttachedManager AttachedManager::attach(const std::string& service, const Settings& settings) {
  const auto path = socket_path(service);
  check_descriptors();
  const auto deadline = base::Deadline::in_seconds(settings.patience_s);
  const auto name = header_text(settings.name.empty() ? program_invocation_short_name : settings.name);
  const auto head = fmt::format(
      "Connection: Upgrade\r\nUpgrade: accelmgr-host\r\nAccelmgr-Build: {:016x}\r\nAccelmgr-Host: {}\r\n",
      protocol::build_fingerprint(), name);
  for (;;) {
    // A service that runs answers within a second: what keeps it from admitting this host is in the answer.
    const auto answered = base::Deadline::at_ns(std::max(deadline.ns(), base::now_ns() + answer_ns));
    auto socket = ServiceSocket::connect(path, answered, settings.interrupted);
    auto answer = socket.ask("GET", "/v1/attach", head, "", answered);
    if (answer.status == 101 && !answer.fd)
      throw SessionError(fmt::format(
          "the service at '{}' has admitted this host, but its descriptor did not arrive: this process may "
          "open no more",
          path));
    if (answer.status == 101) {
      const auto soon = base::Deadline::in_seconds(timing::first_words_s);
      auto attached = protocol::receive_attached(answer.fd.get(), soon);
      auto begun = protocol::receive_answer(answer.fd.get(), soon);
      auto* started = std::get_if<protocol::Started>(&begun);
      if (started == nullptr) throw SessionError("the service did not say which runners it has");
      Link link(std::move(answer.fd), socket.take_service(), attached.lease);
      link.take_in(std::move(*started));
      return {path, std::move(link), std::move(attached)};
    }
    const bool interrupted = settings.interrupted && settings.interrupted();
    if (!passes(answer) || deadline.passed() || interrupted)
      throw SessionError(
          fmt::format("the service at '{}' does not admit this host: {}", path, error_text(answer)));
    // The runners still start, or the host before still ends. The service sends no message when that is done.
    const timespec look{.tv_sec = 0, .tv_nsec = timing::look_ns};
    nanosleep(&look, nullptr);
  }
}

void AttachedManager::detach() noexcept {
  try {
    link_.send(protocol::Leave{});
  } catch (const Error&) {
    // The service is gone, or reads nothing. It sees the end of this process.
  }
  link_.close();
}

std::string AttachedManager::end() noexcept {
  const auto deadline = base::Deadline::in_seconds(timing::manager_stop_s);
  if (!link_.wait_until_others_ended(deadline)) {
    link_.kill_runners();
    link_.kill_fork_server();
    link_.wait_until_others_ended(base::Deadline::in_seconds(timing::manager_stop_s));
  }
  link_.wait_until_manager_ended(base::Deadline::in_seconds(timing::manager_stop_s));
  link_.forget_manager();
  return "the service has ended";
}

}  // namespace accelmgr::client
