#include "engine/manager/driver.hpp"

#include <fmt/format.h>

#include <iterator>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"

namespace accelmgr::manager {

Driver::Driver(boost::asio::io_context& loop, base::UniqueFd socket, base::UniqueFd pidfd,
               std::uint64_t lease, const session::SupervisorView& view, Events events)
    : socket_(std::move(socket)),
      pidfd_(std::move(pidfd)),
      lease_(lease),
      view_(view),
      events_(std::move(events)),
      requests_(loop, socket_.get(), [this] { return serve_request(); }),
      process_(loop, pidfd_.get(), [this] {
        events_.left(/*detached=*/false);
        return false;
      }) {}

void Driver::catch_up() {
  constexpr int most = 100;  // One that sends without end must not hold up the loop.
  for (int taken = 0; taken < most && ipc::is_readable(socket_.get()); ++taken)
    if (!serve_request()) break;
  if (ipc::has_ended(pidfd_.get())) events_.left(/*detached=*/false);
}

// Not inline: g++ 12 would warn that members of other notices are uninitialized.
void Driver::tell(protocol::Notice notice) { notices_.push_back(std::move(notice)); }

void Driver::send_notices() {
  try {
    while (!notices_.empty() && protocol::send_notice(socket_.get(), notices_.front())) {
      notices_.pop_front();
      view_.wake_for_readiness();
    }
  } catch (const SystemError& error) {
    // When the driver is gone, its socket and its pidfd report it. After other errors the next call tries
    // again.
    if (ipc::peer_is_gone(error)) notices_.clear();
  }
  // Bounds the queue when the driver does not read: only the newest Joined of each rank is kept.
  for (auto n = notices_.begin(); n != notices_.end();) {
    const auto* joined = std::get_if<protocol::Joined>(&*n);
    const bool stale =
        joined != nullptr && joined->generation != view_.session().record(joined->rank).generation.load();
    n = stale ? notices_.erase(n) : std::next(n);
  }
}

// Returns whether the socket is watched on. An exception would end the loop, and all that is on it.
bool Driver::serve_request() {
  try {
    auto request = protocol::next_request(socket_.get(), lease_);
    return !request || serve(*request);
  } catch (const std::exception& error) {
    refusals_.note(fmt::format("a request of the host: {}", error.what()));
    return true;
  }
}

bool Driver::serve(protocol::Received& request) {
  const auto& session = view_.session();
  base::set_log_step(session.counters(session.word().index).steps + 1);
  const bool detached = std::holds_alternative<protocol::Leave>(request);
  if (detached || std::holds_alternative<protocol::Closed>(request)) {
    events_.left(detached);
    return false;
  }
  if (const auto* refused = std::get_if<protocol::Refused>(&request)) {
    refusals_.note(refused->why);
  } else if (const auto* size = std::get_if<protocol::Resize>(&request)) {
    tell(events_.resize(size->ranks));
    send_notices();
  } else {
    serve(std::move(std::get<protocol::Save>(request)));
  }
  return true;
}

void Driver::serve(protocol::Save save) {
  protocol::Saved failed{};
  failed.step = save.step;
  try {
    return events_.save(std::move(save));
  } catch (const std::exception& error) {
    failed.error = error.what();
  }
  base::log().info("the checkpoint of step {} was not written: {}", failed.step, failed.error);
  tell(std::move(failed));
  send_notices();
}

}  // namespace accelmgr::manager
