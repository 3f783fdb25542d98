#include "collective/networked.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace accelmgr::collective {

using Cause = CollectiveError::Cause;

namespace {

/// FNV-1a. The same in every build: std::hash need not be.
std::uint64_t hash(std::string_view text) noexcept {
  std::uint64_t value = 0xcbf29ce484222325;
  for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return value;
}

}  // namespace

Networked::Networked(Setup setup)
    : setup_(std::move(setup)), mailbox_(*setup_.store, setup_.name + "/mail", setup_.rank, setup_.address) {}

Networked::Call Networked::begin(CallKind kind, std::size_t count, DType dtype, ReduceOp op, int root,
                                 const CallOptions& options) {
  const auto timeout_s = timeout_of(options);
  const auto signature = make_signature(kind, count, dtype, op, root, ++calls_, options);
  if (fork_mark_.inherited()) check_process(describe(signature));
  if (broken_) throw missing_ranks(Cause::broken, signature, broken_->ranks, timeout_s);
  return {*this, signature, timeout_s};
}

void Networked::fail(const Call& call, gloo::Failure failure) {
  if (!broken_) broken_ = failure;
  throw missing_ranks(failure.cause, call.signature, std::move(failure.ranks), call.timeout_s);
}

void Networked::check_agreement(const Call& call, const std::vector<Signature>& signatures) const {
  try {
    check_same(signatures, ranks());
  } catch (const CollectiveError&) {
    call.ends_alike = true;
    throw;
  }
}

void Networked::give_up() noexcept {
  if (broken_) return;
  broken_ = gloo::Failure{Cause::lost, {setup_.ranks[static_cast<std::size_t>(setup_.rank)]}};
  leave(*broken_);
}

void Networked::check_process(std::string_view call) const {
  if (fork_mark_.inherited())
    throw UsageError(fmt::format("{}: this communicator belongs to the process that forked this one", call));
}

void Networked::check_member(int rank, const char* what) const {
  if (rank < 0 || rank >= size())
    throw UsageError(fmt::format("{} {} is no rank of a communicator of {}", what, rank, size()));
}

void Networked::check_peer(int rank) const {
  check_member(rank, "peer");
  if (rank == setup_.rank)
    throw UsageError(fmt::format("rank {} can neither send to nor receive from itself", rank));
}

void Networked::check_usable(const std::string& what) const {
  check_process(what);
  if (broken_)
    throw CollectiveError(
        fmt::format("{}: an earlier call ended without rank{} {}; make a new communicator with group()", what,
                    broken_->ranks.size() == 1 ? "" : "s", fmt::join(broken_->ranks, ", ")),
        Cause::broken, broken_->ranks);
}

void Networked::check_transfer(Mailbox::Result result, const std::string& what, int peer, double timeout_s) {
  if (result == Mailbox::Result::done) return;
  const bool lost = result == Mailbox::Result::lost;
  const int rank = setup_.ranks[static_cast<std::size_t>(peer)];
  broken_ = gloo::Failure{lost ? Cause::lost : Cause::timeout, {rank}};
  leave(*broken_);
  throw CollectiveError(lost ? fmt::format("{}: it has died or cannot be reached", what)
                             : fmt::format("{}: it did not answer within {:g} s", what, timeout_s),
                        broken_->cause, {rank});
}

void Networked::send_over_network(std::string_view object, int to, const CallOptions& options) {
  const auto what = fmt::format("send to rank {}", setup_.ranks[static_cast<std::size_t>(to)]);
  check_usable(what);
  const auto timeout_s = timeout_of(options);
  check_transfer(mailbox_.send(object, to, base::Deadline::in_seconds(timeout_s)), what, to, timeout_s);
}

std::string Networked::receive_over_network(int from, const CallOptions& options) {
  const auto what = fmt::format("receive from rank {}", setup_.ranks[static_cast<std::size_t>(from)]);
  check_usable(what);
  const auto timeout_s = timeout_of(options);
  std::string object;
  check_transfer(mailbox_.receive(object, from, base::Deadline::in_seconds(timeout_s)), what, from,
                 timeout_s);
  return object;
}

Networked::Setup Networked::setup_of_group(std::span<const int> ranks, const CallOptions& options) {
  check_process("group");
  const auto list = fmt::format("{}", fmt::join(ranks, ","));
  if (std::ranges::adjacent_find(ranks, std::greater_equal<>{}) != ranks.end())
    throw UsageError(fmt::format("the ranks of a group ascend, without doubles, not {}", list));
  for (const int rank : ranks) check_member(rank, "member");
  const auto self = std::ranges::find(ranks, rank());
  if (self == ranks.end())
    throw UsageError(fmt::format("rank {} makes a group of {}, and is none of them", rank(), list));
  Setup group = setup_;
  // Groups of groups of many ranks would have names that no store takes.
  group.name = fmt::format("{}/group {:016x}", setup_.world,
                           hash(fmt::format("{} {} {}", setup_.name, list, ++groups_[list])));
  group.rank = static_cast<int>(self - ranks.begin());
  group.connect_timeout_s = timeout_of(options);
  group.connect_by = base::Deadline::in_seconds(group.connect_timeout_s);
  group.ranks.clear();
  for (const int rank : ranks) group.ranks.push_back(setup_.ranks[static_cast<std::size_t>(rank)]);
  return group;
}

}  // namespace accelmgr::collective
