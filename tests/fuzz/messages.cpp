// The input is a packet between host and manager. Its first byte says who sends it. Its second byte says how
// many descriptors come with it: all of them are memfds, as a configuration is.
#include "engine/protocol/messages.hpp"
#include <cmath>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/socket.hpp"
#include "engine/session/step_word.hpp"
#include "fuzz_target.hpp"
#include "fuzzed.hpp"

using namespace accelmgr;
using fuzz::expect;

namespace {

void check(const protocol::Joined& runner) {
  expect(runner.rank >= 0 && runner.rank < session::max_ranks && runner.pid > 1 && runner.pidfd, "a runner");
}

bool raises(const protocol::Failed& failed) {
  try {
    protocol::raise(failed);
  } catch (const Error&) {
    return true;
  }
  return false;
}

void receive(int socket, char kind, std::string_view text) {
  const auto soon = base::Deadline::in_seconds(0);
  if (kind == 'r') {
    const auto request = protocol::next_request(socket, 1);
    if (std::holds_alternative<protocol::Leave>(*request))
      expect(nlohmann::json::parse(text, nullptr, false).value("type", "") == "Leave",
             "a host leaves when it says so");
    if (const auto* resize = std::get_if<protocol::Resize>(&*request))
      expect(resize->ranks >= 1 && resize->ranks <= session::max_ranks, "a number of ranks");
    if (const auto* save = std::get_if<protocol::Save>(&*request))
      expect(save->model && save->training && save->description, "three files of a checkpoint");
    if (const auto* refused = std::get_if<protocol::Refused>(&*request)) {
      expect(!refused->why.empty(), "a reason");
      ++fuzz::refused;
    }
  } else if (kind == 'n') {
    const auto notice = protocol::next_notice(socket);
    if (!notice) {
      ++fuzz::refused;
      return;
    }
    if (const auto* saved = std::get_if<protocol::Saved>(&*notice))
      expect(std::isfinite(saved->write_ms), "a time");
    if (const auto* joined = std::get_if<protocol::Joined>(&*notice)) check(*joined);
    if (const auto* relaunched = std::get_if<protocol::Relaunched>(&*notice))
      expect(!!relaunched->pidfd, "a process");
  } else if (kind == 'a') {
    const auto answer = protocol::receive_answer(socket, soon);
    if (const auto* opening = std::get_if<protocol::Opening>(&answer))
      expect(opening->lease > 0 && opening->configuration.size() <= 10 &&
                 (opening->tenure == protocol::Tenure::of_host || !opening->session.empty()),
             "a lease of a session");
    if (const auto* failed = std::get_if<protocol::Failed>(&answer)) expect(raises(*failed), "an error");
    if (const auto* started = std::get_if<protocol::Started>(&answer))
      for (const auto& runner : started->runners) check(runner);
  } else if (kind == 'b') {
    const auto begin = protocol::receive_begin(socket, soon);
    expect(begin.session.size() <= 1 + session::max_ranks && begin.configuration.size() <= 10, "a session");
  } else {
    protocol::receive_noted(socket, soon);
    expect(nlohmann::json::parse(text, nullptr, false).value("type", "") == "Noted", "a note");
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const auto text = fuzz::text_of(data + 2, size - 2);
  const auto open_before = test::open_count();
  {
    const auto [ours, theirs] = ipc::socket_pair();
    std::vector<base::UniqueFd> passed(data[1] % 32);
    for (auto& fd : passed) fd = ipc::create_memfd("configuration", 10);
    test::send_raw(theirs.get(), text, passed);
    protocol::send_noted(theirs.get());
    try {
      receive(ours.get(), static_cast<char>(data[0]), text);
    } catch (const SessionError&) {
      ++fuzz::refused;
    }
  }
  expect(test::open_count() == open_before, "all descriptors are closed");
  return 0;
}
