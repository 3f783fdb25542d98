#include "engine/service/events.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/checked_fields.hpp"
#include "engine/service/query.hpp"
#include "engine/service/status.hpp"
#include "engine/session/step_history.hpp"

namespace accelmgr::service {
namespace {

using manager::Lease;
using nlohmann::json;

/// How often the session is looked at while there are subscribers.
constexpr std::chrono::milliseconds look_interval{100};
constexpr int most_silent_looks = 50;

std::string event(const char* name, Events::Position at, std::string_view data) {
  return fmt::format("id: {}.{}\nevent: {}\ndata: {}\n\n", at.steps, at.incidents, name, data);
}

/// The lease of the host that drives the session; 0: none does. The service's own steps are no host's.
std::uint64_t host_of_now(const Lease::Standing& lease) { return lease.has_host() ? lease.number : 0; }

}  // namespace

Events::Position Events::now() const {
  const auto& session = manager_.session();
  return {.steps = session::recorded_steps(session), .incidents = session.control().incidents.load()};
}

Events::Position Events::position_in(const std::string& text, const std::string& what) const {
  const auto point = text.find('.');
  const auto steps = whole_number(text.substr(0, point), what, 0, most_steps);
  const auto incidents = point == std::string::npos
                             ? now().incidents
                             : whole_number(text.substr(point + 1), what, 0, most_steps);
  return {.steps = steps, .incidents = incidents};
}

bool Events::has_subscribers() {
  std::erase_if(clients_, [](const auto& client) { return client.expired(); });
  return !clients_.empty();
}

bool Events::has_room() {
  has_subscribers();
  return clients_.size() < most_subscribers;
}

void Events::subscribe(std::weak_ptr<Stream> client, std::optional<Position> from) {
  if (has_subscribers()) {
    look();
  } else {
    seen_ = now();
    host_seen_ = host_of_now(manager_.lease().standing());
  }
  if (const auto stream = client.lock()) {
    const auto begin = from.value_or(seen_);
    stream->send(host_event(from ? begin : seen_) + since(begin, seen_));
    clients_.push_back(std::move(client));
  }
  look_later();
}

/// Numbers beyond the last one are those of another session: then all that this one has is new.
std::string Events::since(Position from, Position to) const {
  const auto& session = manager_.session();
  if (from.steps > to.steps) from.steps = 0;
  if (from.incidents > to.incidents) from.incidents = 0;
  const auto first_incident =
      to.incidents > session::max_incidents ? to.incidents - session::max_incidents + 1 : 1;
  std::string text;
  Position at{.steps = from.steps, .incidents = from.incidents};
  for (auto number = std::max(from.incidents + 1, first_incident); number <= to.incidents; ++number) {
    at.incidents = number;
    text += event("incident", at, base::json_text(incident_of(number, session.incident(number))));
  }
  for (auto number = std::max(from.steps + 1, session::first_step_record(to.steps)); number <= to.steps;
       ++number) {
    const auto record = session::step_record(session, number);
    if (!record) continue;  // The host has gone on: it is written over.
    at.steps = number;
    text += event("step", at, record_text(number, *record));
  }
  return text;
}

std::string Events::host_event(Position at) const {
  return event("host", at,
               base::json_text({{"host", host_seen_ == 0 ? json() : host_of(manager_.lease().standing())}}));
}

void Events::look() {
  if (!has_subscribers()) return;
  const auto before = std::exchange(seen_, now());
  auto text = since(before, seen_);
  if (const auto host = host_of_now(manager_.lease().standing()); host != host_seen_) {
    host_seen_ = host;
    text += host_event(seen_);
  }
  if (text.empty() && ++silent_looks_ < most_silent_looks) return;
  // A client of TCP that has left is found out only when something is sent to it: a comment, which means
  // nothing.
  send(text.empty() ? ":\n\n" : text);
  silent_looks_ = 0;
}

void Events::closing(const std::string& why) {
  look();
  send(event("closing", seen_, base::json_text({{"why", why}})));
}

void Events::send(const std::string& text) {
  for (const auto& client : clients_)
    if (const auto stream = client.lock()) stream->send(text);
}

void Events::look_later() {
  if (looks_later_ || !has_subscribers()) return;
  looks_later_ = true;
  timer_.expires_after(look_interval);
  timer_.async_wait([this](const boost::system::error_code& error) {
    looks_later_ = false;
    if (error) return;
    look();
    look_later();
  });
}

}  // namespace accelmgr::service
