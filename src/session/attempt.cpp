#include "session/attempt.hpp"

#include <cstring>

namespace accelmgr::session {

namespace {

// The copies of a rank that writes none in this attempt must be right under either index.
void carry_over(const Session& session, RankMask absent) noexcept {
  const auto valid = session.word().index;
  for (int rank = 0; rank < session.ranks(); ++rank) {
    if ((absent >> rank & 1) == 0) continue;
    std::memcpy(session.generator(valid ^ 1, rank), session.generator(valid, rank), generator_bytes);
    std::memcpy(session.buffers(valid ^ 1, rank), session.buffers(valid, rank),
                session.header().buffer_bytes);
  }
}

}  // namespace

std::uint64_t open_attempt(const Session& session, const Request& request) noexcept {
  auto& control = session.control();
  if (!session.word().closed) return 0;
  if (const auto absent = all_ranks(session.ranks()) & ~request.participants; absent != 0)
    carry_over(session, absent);
  control.request = request;
  const auto attempt = open(control.word);
  if (attempt != 0) ipc::advance(control.trigger);
  return attempt;
}

Vote cast_vote(const Session& session, std::uint64_t attempt, int rank) noexcept {
  auto& control = session.control();
  const auto outcome = vote(control.word, attempt, rank, control.request.participants);
  if (outcome == Vote::committed) ipc::advance(control.votes);
  return outcome;
}

bool abort_attempt(const Session& session, std::uint64_t attempt, std::uint32_t author) noexcept {
  auto& control = session.control();
  if (!abort(control.word, attempt, author, control.request.participants)) return false;
  session.wake_everyone();
  return true;
}

bool refuse_attempt(const Session& session, std::uint64_t attempt, int rank, Reason reason,
                    const char* what) noexcept {
  auto& record = session.record(rank);
  const auto length = strnlen(what, text_bytes - 1);
  std::memcpy(record.error, what, length);
  record.error[length] = 0;
  record.reason.store(reason);
  record.reason_attempt.store(attempt);
  return abort_attempt(session, attempt, static_cast<std::uint32_t>(rank));
}

bool close_if_over(const Session& session, std::uint64_t attempt) noexcept {
  auto& control = session.control();
  const auto participants = control.request.participants;
  const auto word = session.word();
  if (word.attempt != attempt || word.closed || word.computing(participants)) return false;
  if (!word.abort) {
    for (int rank = 0; rank < session.ranks(); ++rank) {
      if ((participants >> rank & 1) == 0) continue;
      const auto cursor = decode_cursor(session.record(rank).cursor.load());
      if (cursor.attempt != attempt || cursor.chunk != cursor_finished) return false;
    }
  }
  if (!close(control.word, attempt, participants)) return false;
  ipc::advance(control.finish);
  return true;
}

Tally tally(const Session& session, const Request& request) noexcept {
  Tally total;
  for (int rank = 0; rank < session.ranks(); ++rank) {
    if ((request.participants >> rank & 1) == 0) continue;
    const auto& ballot = session.record(rank).ballot;
    total.loss += ballot.loss;
    total.samples += ballot.samples;
    total.elements += ballot.elements;
    total.micro_batches += ballot.micro_batches;
    total.nonfinite = total.nonfinite || ballot.nonfinite != 0;
  }
  return total;
}

}  // namespace accelmgr::session
