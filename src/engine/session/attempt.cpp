#include "engine/session/attempt.hpp"

#include <algorithm>
#include <cstring>

namespace accelmgr::session {

SharedControl& shared(const View& view) noexcept { return view.memory_->control(); }

namespace {

// A rank that takes no part writes no state copy, so both of its copies must be right whether the index flips
// or not.
void carry_over(const HostView& host, RankMask absent) noexcept {
  const auto& session = host.session();
  const auto valid = session.word().index;
  for (int rank = 0; rank < session.ranks(); ++rank) {
    if ((absent >> rank & 1) == 0) continue;
    std::memcpy(host.generator(valid ^ 1, rank), session.generator(valid, rank), generator_bytes);
    std::memcpy(host.buffers(valid ^ 1, rank), session.buffers(valid, rank), session.header().buffer_bytes);
  }
}

}  // namespace

std::uint64_t open_attempt(const HostView& host, const Request& request) noexcept {
  const auto& session = host.session();
  if (!session.word().closed) return 0;
  if (const auto absent = all_ranks(session.ranks()) & ~request.participants; absent != 0)
    carry_over(host, absent);
  host.control().request = request;
  const auto attempt = open(shared(host).word);
  if (attempt != 0) ipc::advance(shared(host).trigger);
  return attempt;
}

Vote cast_vote(const RunnerView& runner, std::uint64_t attempt, bool may_commit) noexcept {
  const RankMask participants = runner.session().control().request.participants;
  const auto outcome = vote(shared(runner).word, attempt, runner.rank(), participants, may_commit);
  if (outcome == Vote::committed) ipc::advance(shared(runner).votes);
  return outcome;
}

bool abort_attempt(const View& view, std::uint64_t attempt, std::uint32_t author) noexcept {
  if (!abort(shared(view).word, attempt, author, view.session().control().request.participants)) return false;
  view.wake_everyone();
  return true;
}

bool refuse_attempt(const RunnerView& runner, std::uint64_t attempt, Reason reason,
                    const char* what) noexcept {
  auto& record = runner.record();
  const auto length = strnlen(what, text_bytes - 1);
  std::memcpy(record.error, what, length);
  record.error[length] = 0;
  record.reason.store(reason);
  record.reason_attempt.store(attempt);
  return abort_attempt(runner, attempt, static_cast<std::uint32_t>(runner.rank()));
}

namespace {

/// `cursor_of` returns the cursor of a record.
template <class CursorOf>
bool all_finished(const Session& session, std::uint64_t attempt, CursorOf cursor_of) noexcept {
  const RankMask participants = session.control().request.participants;
  for (int rank = 0; rank < session.ranks(); ++rank) {
    if ((participants >> rank & 1) == 0) continue;
    const auto cursor = decode_cursor(cursor_of(session.record(rank)).load());
    if (cursor.attempt != attempt || cursor.chunk != cursor_finished) return false;
  }
  return true;
}

}  // namespace

bool slices_finished(const Session& session, std::uint64_t attempt) noexcept {
  return all_finished(
      session, attempt, [](const RankRecord& record) -> auto& { return record.cursor; });
}

bool updates_parameters(const Session& session) noexcept {
  const auto& request = session.control().request;
  return request.applies == Applies::session && request.skip == 0 &&
         mean_scale(request, tally(session, request)) != 0;
}

bool is_done(const Session& session, std::uint64_t attempt) noexcept {
  if (!slices_finished(session, attempt)) return false;
  return !updates_parameters(session) || all_finished(
                                             session, attempt, [](const RankRecord& record) -> auto& {
                                               return record.update_cursors[0].bits;
                                             });
}

bool gave_gradient(const Session& session, std::size_t tensor, std::uint64_t attempt) noexcept {
  const RankMask participants = session.control().request.participants;
  for (int rank = 0; rank < session.ranks(); ++rank)
    if ((participants >> rank & 1) != 0 && session.tags(rank)[tensor].load() == attempt) return true;
  return false;
}

bool updates_tensor(const Session& session, std::size_t tensor, std::uint64_t attempt) noexcept {
  if (session.updated()[tensor].group == no_update_group) return false;
  return session.control().request.update.leaves_absent == 0 || gave_gradient(session, tensor, attempt);
}

std::uint64_t applied_step(const Session& session) noexcept {
  const std::uint64_t in_session = session.counters(session.word().index).updated_step;
  return std::max(in_session, session.control().host_applied_step.load());
}

bool close_if_over(const View& view, std::uint64_t attempt) noexcept {
  const auto& session = view.session();
  const RankMask participants = session.control().request.participants;
  const auto word = session.word();
  if (word.attempt != attempt || word.closed || word.computing(participants)) return false;
  if (!word.abort && !is_done(session, attempt)) return false;
  if (!close(shared(view).word, attempt, participants)) return false;
  ipc::advance(shared(view).finish);
  return true;
}

Tally tally(const Session& session, const Request& request) noexcept {
  Tally total;
  for (int rank = 0; rank < session.ranks(); ++rank) {
    if ((request.participants >> rank & 1) == 0) continue;
    const auto& ballot = session.record(rank).ballot;
    total.loss += ballot.loss;
    total.weight += ballot.weight;
    total.samples += ballot.samples;
    total.elements += ballot.elements;
    total.micro_batches += ballot.micro_batches;
    total.nonfinite = total.nonfinite || ballot.nonfinite != 0;
    total.range.sum += ballot.range.sum;
    total.range.master += ballot.range.master;
  }
  return total;
}

double gradient_range_after(const Session& session, const Request& request, const Tally& tally) noexcept {
  const auto before = session.counters(session.word().index).gradient_range;
  if (request.skip != 0 || request.applies == Applies::one_replica) return before;
  return (request.accumulate != 0 ? before : 0) + tally.range.master * gradient_scale(request, tally);
}

bool sums_fit(const Session& session, const Request& request) noexcept {
  constexpr double whole = 0.99;  // Rounding adds less than the missing part.
  const auto total = tally(session, request);
  const auto largest = request.applies == Applies::one_replica
                           ? total.range.master * gradient_scale(request, total)
                           : gradient_range_after(session, request, total);
  return total.range.sum < whole && largest < whole;
}

}  // namespace accelmgr::session
