#include "engine/service/host_checkpoints.hpp"

#include <fmt/format.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "accelmgr/checkpoint.hpp"
#include "base/timing.hpp"

namespace accelmgr::service {

template <class Written>
Response response_to(const Written& written) {
  if (!written.error.empty())
    return Problem(500, "checkpoint_failed", written.error, {.step = static_cast<std::int64_t>(written.step)})
        .response();
  return json_response({{"step", written.step},
                        {"path", written.path},
                        {"bytes", written.bytes},
                        {"write_ms", written.write_ms},
                        {"warnings", written.warnings}});
}
template Response response_to(const protocol::Saved&);
template Response response_to(const CheckpointWritten&);

void HostCheckpoints::ask(Respond respond, base::Deadline until) {
  asked_.push_back({std::move(respond), until, lease_.saves_of_host(), lease_.steps()});
  lease_.ask_for_checkpoint();
  if (asked_.size() == 1) look_for_late();
}

void HostCheckpoints::saved(const protocol::Saved& saved) {
  const auto answers = [&](Asked& asked) {
    if (asked.earlier > 0) {
      --asked.earlier;
      return false;
    }
    return !saved.error.empty() || saved.step >= asked.step;
  };
  std::vector<Respond> answered;
  std::erase_if(asked_, [&](Asked& asked) {
    if (!answers(asked)) return false;
    answered.push_back(std::move(asked.respond));
    return true;
  });
  for (const auto& respond : answered) respond(response_to(saved));
}

void HostCheckpoints::left() {
  if (asked_.empty()) return;
  answer_all(Problem(503, "host_left", "the host has left, and has written no checkpoint",
                     {.hint = "ask again: without a host the service writes one itself"})
                 .response());
}

void HostCheckpoints::answer_all(const Response& response) {
  for (const auto& asked : std::exchange(asked_, {})) asked.respond(response);
}

void HostCheckpoints::look_for_late() {
  timer_.expires_after(std::chrono::nanoseconds(timing::look_ns));
  timer_.async_wait([this](const boost::system::error_code& error) {
    if (error) return;
    for (auto asked = asked_.begin(); asked != asked_.end();) {
      if (!asked->until.passed()) {
        ++asked;
        continue;
      }
      const auto respond = std::move(asked->respond);
      asked = asked_.erase(asked);
      const auto& host = lease_.host();
      respond(Problem(504, "timeout",
                      fmt::format("{} (pid {}) has written no checkpoint in time", host.name, host.pid),
                      {.hint = "a host must look at checkpoint_requested() between its steps, and then call "
                               "save_checkpoint()"})
                  .response());
    }
    if (!asked_.empty()) look_for_late();
  });
}

}  // namespace accelmgr::service
