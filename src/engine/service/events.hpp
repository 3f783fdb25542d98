// What happens in a session, for the clients that subscribe to it, as server-sent events
// (https://html.spec.whatwg.org/multipage/server-sent-events.html):
//
// clang-format off
//   | event    | data                                                       | when                              |
//   |----------|------------------------------------------------------------|-----------------------------------|
//   | host     | {"host": as in /v1/status, or null}                        | at first, and when it changes     |
//   | step     | as in /v1/steps                                            | a call of step() has returned     |
//   | incident | rank, pid, phase, exit, what, ... as in the error report   | a process of the session was lost |
//   | closing  | {"why": ...}                                               | the service begins to end         |
// clang-format on
//
// The id of an event says how far a client has come: STEPS.INCIDENTS.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/manager/manager.hpp"
#include "engine/service/request.hpp"

namespace accelmgr::service {

/// Looks at the session's memory while there are subscribers. Used by the thread of its loop. Does not block.
class Events {
 public:
  static constexpr std::size_t most_subscribers = 100;

  struct Position {
    std::uint64_t steps = 0;  ///< Records of the step history.
    std::uint64_t incidents = 0;
  };

  /// `manager` must have been started, and outlive this.
  Events(boost::asio::io_context& loop, manager::Manager& manager) : manager_(manager), timer_(loop) {}

  /// Whether one more client may subscribe.
  bool has_room();
  /// The position that an id or `since` states: "17.2", or "17", whose incidents are those until now. Throws
  /// Problem, which names `what`.
  Position position_in(const std::string& text, const std::string& what) const;
  /// From now on the client gets events. It first gets those after `since` that the session still has.
  void subscribe(std::weak_ptr<Stream> client, std::optional<Position> since);
  /// Sends what has happened since the last look. Call it when a host has come or gone, and at the end.
  void look();
  void closing(const std::string& why);

 private:
  Position now() const;
  bool has_subscribers();
  std::string since(Position from, Position to) const;
  std::string host_event(Position at) const;
  void send(const std::string& text);
  void look_later();

  manager::Manager& manager_;
  boost::asio::steady_timer timer_;
  bool looks_later_ = false;
  int silent_looks_ = 0;
  std::vector<std::weak_ptr<Stream>> clients_;
  Position seen_{};
  std::uint64_t host_seen_ = 0;  ///< The lease of the host that drove at the last look; 0: there was none.
};

}  // namespace accelmgr::service
