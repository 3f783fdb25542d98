#include "engine/service/trace.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <vector>

#include "engine/service/query.hpp"
#include "engine/session/spans.hpp"

namespace accelmgr::service {
namespace {

using Positions = std::vector<std::uint64_t>;

/// An answer has at most so many spans of each thread, and of all threads: the supervisor waits meanwhile.
constexpr std::uint64_t most_of_a_thread = 1024, most_of_all = 4096;

Positions positions_of_now(const session::Session& session) {
  Positions positions;
  for (std::uint64_t ring = 0; ring < session::span_rings(session.ranks()); ++ring)
    positions.push_back(session::recorded_spans(session.span_ring(ring)));
  return positions;
}

/// Numbers beyond the last one are those of an earlier service: then all that this session has is new.
Positions positions_in(const std::string& text, const Positions& now) {
  Positions positions;
  for (std::size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find('.', begin), text.size());
    positions.push_back(whole_number(text.substr(begin, end - begin), "since", 0, most_steps));
    begin = end + 1;
  }
  if (positions.size() != now.size())
    throw Problem(400, "bad_request",
                  fmt::format("since is '{}'; it must be 'now', or the 'next' of an answer", text));
  for (std::size_t ring = 0; ring < now.size(); ++ring)
    if (positions[ring] > now[ring]) positions[ring] = 0;
  return positions;
}

void append(std::string& text, const session::Span& span) {
  const auto to = std::back_inserter(text);
  fmt::format_to(to, R"({{"begin_ns":{},"end_ns":{},"activity":"{}","pid":{})", span.begin_ns, span.end_ns,
                 to_string(span.activity), span.pid);
  if (span.step != 0) fmt::format_to(to, R"(,"step":{})", span.step);
  if (span.attempt != 0) fmt::format_to(to, R"(,"attempt":{})", span.attempt);
  if (span.rank >= 0) fmt::format_to(to, R"(,"rank":{})", span.rank);
  text += "},";
}

std::string thread_of(const session::Session& session, std::uint64_t ring) {
  constexpr const char* names[session::span_threads] = {"host", "supervisor", "loader", "checkpoint_writer"};
  const auto ranks = static_cast<std::uint64_t>(session.ranks());
  if (ring < ranks) return fmt::format(R"("thread":"runner","rank":{})", ring);
  return fmt::format(R"("thread":"{}")", names[ring - ranks]);
}

/// Appends up to `most` spans after number `at`, which moves on. Returns how many of them are gone.
std::uint64_t append_spans(std::string& text, const session::SpanRing& ring, std::uint64_t& at,
                           std::uint64_t most) {
  const auto recorded = session::recorded_spans(ring);
  const auto first = std::max(at + 1, session::first_span(recorded));
  auto overwritten = first - (at + 1);
  const auto size = text.size();
  for (at = first - 1; at < recorded && at + 1 < first + most; ++at) {
    if (const auto span = session::span_numbered(ring, at + 1))
      append(text, *span);
    else
      ++overwritten;  // The thread has gone on meanwhile.
  }
  if (text.size() > size) text.pop_back();  // The last comma.
  return overwritten;
}

}  // namespace

// The text is made by hand: as a tree of values it would take the supervisor's thread ten times as long.
void trace(Service& service, const Request& request, const Respond& respond) {
  const auto& session = service.manager().session();
  const auto now = positions_of_now(session);
  const auto since = request.query.find("since");
  const bool all = since == request.query.end();
  Positions at(now.size());
  if (!all) at = since->second == "now" ? now : positions_in(since->second, now);
  const auto most = std::min(most_of_a_thread, most_of_all / at.size());
  std::string text = R"({"threads":[)";
  for (std::uint64_t ring = 0; ring < at.size(); ++ring) {
    fmt::format_to(std::back_inserter(text), R"({}{{{},"spans":[)", ring == 0 ? "" : ",",
                   thread_of(session, ring));
    const auto overwritten = append_spans(text, session.span_ring(ring), at[ring], most);
    fmt::format_to(std::back_inserter(text), R"(],"overwritten":{}}})", all ? 0 : overwritten);
  }
  bool more = false;
  for (std::size_t ring = 0; ring < at.size(); ++ring) more = more || at[ring] < now[ring];
  fmt::format_to(std::back_inserter(text), R"(],"next":"{}","more":{}}})", fmt::join(at, "."), more);
  respond({.body = std::move(text)});
}

}  // namespace accelmgr::service
