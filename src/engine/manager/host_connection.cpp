#include "engine/manager/host_connection.hpp"

#include <fmt/format.h>

#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"

namespace accelmgr::manager {

HostConnection::HostConnection(boost::asio::io_context& loop, HostLink& link,
                               const session::SupervisorView& view, Supervisor& supervisor, Events events)
    : link_(link),
      view_(view),
      supervisor_(supervisor),
      events_(std::move(events)),
      socket_(loop, link.socket(), [this] { return serve_request(); }),
      process_(loop, link.pidfd(), [this] {
        events_.ended();
        return false;
      }) {}

void HostConnection::catch_up() {
  constexpr int most = 100;  // A host that sends without end must not hold up the loop.
  for (int taken = 0; taken < most && ipc::is_readable(link_.socket()); ++taken)
    if (!serve_request()) break;
  if (ipc::has_ended(link_.pidfd())) events_.ended();
}

void HostConnection::tell(protocol::Notice notice) {
  link_.tell(std::move(notice));
  link_.send_notices(view_);
}

// Returns whether the socket is watched on. An exception would end the loop, and all that is on it.
bool HostConnection::serve_request() {
  try {
    auto request = link_.next_request();
    return !request || serve(*request);
  } catch (const std::exception& error) {
    refusals_.note(fmt::format("a request of the host: {}", error.what()));
    return true;
  }
}

bool HostConnection::serve(protocol::Received& request) {
  const auto& session = view_.session();
  base::set_log_step(session.counters(session.word().index).steps + 1);
  if (std::holds_alternative<protocol::Stop>(request)) {
    if (!ipc::is_closed(link_.socket())) return leave(events_.stop, "Stop");
    // The end of the socket, or a Stop before it.
    events_.closed();
    return false;
  }
  if (std::holds_alternative<protocol::Detach>(request)) return leave(events_.detach, "Detach");
  if (const auto* refused = std::get_if<protocol::Refused>(&request))
    refusals_.note(refused->why);
  else if (const auto* size = std::get_if<protocol::Resize>(&request))
    serve(*size);
  else
    serve(std::move(std::get<protocol::Save>(request)));
  return true;
}

void HostConnection::serve(const protocol::Resize& size) {
  protocol::Resized answer;
  try {
    answer = supervisor_.resize(size.ranks);
  } catch (const std::exception& error) {
    answer.refused = error.what();
  }
  tell(std::move(answer));
}

void HostConnection::serve(protocol::Save save) {
  protocol::Saved failed{};
  failed.step = save.step;
  try {
    return events_.save(std::move(save));
  } catch (const std::exception& error) {
    failed.error = error.what();
  }
  base::log().info("the checkpoint of step {} was not written: {}", failed.step, failed.error);
  tell(std::move(failed));
}

bool HostConnection::leave(const std::function<void()>& event, const char* request) {
  if (event) {
    event();
    return false;
  }
  refusals_.note(fmt::format("a request of the host: '{}' is not for this kind of host", request));
  return true;
}

}  // namespace accelmgr::manager
