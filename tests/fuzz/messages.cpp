// The input is a packet between host and manager. Its first byte says who sends it. Its second byte says how
// many descriptors come with it; they are not descriptors of a session.
#include "engine/protocol/messages.hpp"
#include "accelmgr/errors.hpp"
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

void receive(int socket, char kind) {
  const auto soon = base::Deadline::in_seconds(0);
  if (kind == 'r') {
    const auto request = protocol::next_request(socket);
    if (const auto* resize = std::get_if<protocol::Resize>(&*request))
      expect(resize->ranks >= 1 && resize->ranks <= session::max_ranks, "a number of ranks");
    if (const auto* save = std::get_if<protocol::Save>(&*request))
      expect(save->model && save->training && save->description, "three files of a checkpoint");
    if (const auto* refused = std::get_if<protocol::Refused>(&*request))
      expect(!refused->why.empty(), "a reason");
  } else if (kind == 'n') {
    const auto notice = protocol::next_notice(socket);
    if (!notice) return;
    if (const auto* joined = std::get_if<protocol::Joined>(&*notice)) check(*joined);
    if (const auto* relaunched = std::get_if<protocol::Relaunched>(&*notice))
      expect(!!relaunched->pidfd, "a process");
  } else if (kind == 'a') {
    const auto answer = protocol::receive_answer(socket, soon);
    if (const auto* prepared = std::get_if<protocol::Prepared>(&answer))
      expect(!prepared->session.empty(), "a session");
    if (const auto* assigned = std::get_if<protocol::Assigned>(&answer))
      expect(assigned->nprocs >= 1 && assigned->nprocs <= session::max_ranks, "a number of ranks");
    if (const auto* started = std::get_if<protocol::Started>(&answer))
      for (const auto& runner : started->runners) check(runner);
  } else {
    const auto attached = protocol::receive_attached(socket, soon);
    expect(attached.lease > 0 && !attached.session.empty(), "a lease of a session");
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const auto open_before = test::open_count();
  {
    const auto [ours, theirs] = ipc::socket_pair();
    std::vector<base::UniqueFd> passed(data[1] % 32);
    for (auto& fd : passed) fd.reset(open("/dev/null", O_RDONLY | O_CLOEXEC));
    test::send_raw(theirs.get(), fuzz::text_of(data + 2, size - 2), passed);
    protocol::send_configuration(theirs.get(), "nprocs: 2\n");
    try {
      receive(ours.get(), static_cast<char>(data[0]));
    } catch (const SessionError&) {
    }
  }
  expect(test::open_count() == open_before, "all descriptors are closed");
  return 0;
}
