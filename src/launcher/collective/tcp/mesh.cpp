#include "launcher/collective/tcp/mesh.hpp"

#include <poll.h>

#include <algorithm>

#include "base/interruption.hpp"
#include "base/timing.hpp"

namespace accelmgr::collective::tcp {
namespace {

using Cause = CollectiveError::Cause;

void add(std::vector<int>& ranks, int rank) {
  if (std::ranges::find(ranks, rank) == ranks.end()) ranks.push_back(rank);
}

base::Deadline in_ns(std::int64_t ns) noexcept { return base::Deadline::at_ns(base::now_ns() + ns); }

/// Blocks until one of the events has come or the deadline passes.
void wait_for_events(std::vector<pollfd>& events, base::Deadline deadline) noexcept {
  const auto left_ns = std::max<std::int64_t>(deadline.remaining_ns(), 0);
  const timespec timeout{.tv_sec = left_ns / 1'000'000'000, .tv_nsec = left_ns % 1'000'000'000};
  ppoll(events.data(), events.size(), &timeout, nullptr);
}

}  // namespace

Note note_of(const Failure& failure) noexcept {
  Note note{failure.cause, 0, {}};
  for (const int rank : failure.ranks)
    if (note.count < note.ranks.size()) note.ranks[note.count++] = rank;
  return note;
}

Failure failure_of(const Note& note) {
  const auto count = std::min<std::size_t>(note.count, note.ranks.size());
  return {note.cause, {note.ranks.begin(), note.ranks.begin() + count}};
}

// Closing a connection discards what this rank has sent last if something that came is unread.
Mesh::~Mesh() {
  if (!fork_mark_.inherited()) read_notes(base::Deadline::at_ns(0));
}

void Mesh::exchange(std::span<const Send> sends, std::span<const Receive> receives, base::Deadline deadline) {
  if (abandoned_) throw ExchangeError({Cause::broken, {}});
  std::vector<Transfer> transfers;
  // Messages that a rank sent before it gave up may have come: this rank is late.
  wait_for(transfers, base::Deadline::at_ns(0));
  for (const auto& send : sends)
    transfers.push_back({send.to, true, static_cast<std::byte*>(const_cast<void*>(send.data)), send.bytes});
  for (const auto& receive : receives)
    transfers.push_back({receive.from, false, static_cast<std::byte*>(receive.data), receive.bytes});
  for (;;) {
    const bool one_gave_up = somebody_gave_up();
    for (auto& transfer : transfers) move(transfer);
    std::erase_if(transfers, [](const Transfer& transfer) { return transfer.left == 0; });
    if (transfers.empty() && !one_gave_up) break;
    if (one_gave_up || deadline.passed() || base::interrupted() ||
        std::ranges::any_of(transfers, &Transfer::lost))
      give_up(transfers);
    wait_for(transfers, base::earlier(deadline, in_ns(timing::mesh_look_ns)));
  }
  ++completed_;
}

void Mesh::move(Transfer& transfer) noexcept {
  const auto& socket = peer(transfer.peer).sockets[0];
  while (transfer.left > 0 && !transfer.lost) {
    const auto moved = transfer.sends ? socket.send(transfer.next, transfer.left)
                                      : socket.receive(transfer.next, transfer.left);
    transfer.lost = !moved;
    if (moved.value_or(0) == 0) return;
    transfer.next += *moved;
    transfer.left -= *moved;
  }
}

/// Blocks until a transfer can go on or a note comes, which it reads.
void Mesh::wait_for(std::span<const Transfer> transfers, base::Deadline until) noexcept {
  std::vector<pollfd> events;
  std::vector<Peer*> connected;
  for (auto& peer : peers_)
    if (peer.state == Peer::State::connected) {
      connected.push_back(&peer);
      events.push_back({.fd = peer.sockets[1].fd(), .events = POLLIN, .revents = 0});
    }
  for (const auto& transfer : transfers)
    events.push_back({.fd = peer(transfer.peer).sockets[0].fd(),
                      .events = static_cast<short>(transfer.sends ? POLLOUT : POLLIN),
                      .revents = 0});
  wait_for_events(events, until);
  for (std::size_t i = 0; i < connected.size(); ++i)
    if (events[i].revents != 0) read_note(*connected[i]);
}

void Mesh::read_note(Peer& peer) noexcept {
  const auto received = peer.sockets[1].receive(reinterpret_cast<std::byte*>(&peer.words) + peer.words_bytes,
                                                sizeof peer.words - peer.words_bytes);
  if (!received)
    peer.state = Peer::State::gone;
  else if ((peer.words_bytes += *received) == sizeof peer.words)
    peer.state = Peer::State::has_noted;
}

/// Waits for the notes of all connected peers.
void Mesh::read_notes(base::Deadline deadline) noexcept {
  const auto is_silent = [](const Peer& peer) { return peer.state == Peer::State::connected; };
  for (;;) {
    for (auto& peer : peers_)
      if (is_silent(peer)) read_note(peer);
    if (deadline.passed() || std::ranges::none_of(peers_, is_silent)) return;
    wait_for({}, deadline);
  }
}

bool Mesh::somebody_gave_up() const noexcept {
  return std::ranges::any_of(peers_, [this](const Peer& peer) {
    return peer.state == Peer::State::has_noted && peer.words.completed <= completed_;
  });
}

void Mesh::give_up(std::vector<Transfer>& transfers) {
  Failure failure{Cause::timeout, {}};
  // A peer that is gone but has no message pending has completed its part. One that gave up leaves a note.
  for (const auto& transfer : transfers) {
    if (!transfer.lost) continue;
    auto& of_peer = peer(transfer.peer);
    const auto until = in_ns(timing::mesh_farewell_ns);
    while (of_peer.state == Peer::State::connected && !until.passed()) wait_for({}, until);
    if (of_peer.state == Peer::State::has_noted) continue;
    failure.cause = Cause::lost;
    add(failure.ranks, world_rank(transfer.peer));
  }
  // Blame the ranks whose messages are missing; if none is, the ranks that have not received ours.
  for (const bool sends : {false, true}) {
    if (!failure.ranks.empty()) break;
    for (const auto& transfer : transfers)
      if (transfer.sends == sends) add(failure.ranks, world_rank(transfer.peer));
  }
  throw ExchangeError(abandon(std::move(failure)));
}

std::vector<int> Mesh::gone(const std::vector<int>& ranks) noexcept {
  std::vector<int> result;
  if (abandoned_) return result;
  read_notes(base::Deadline::at_ns(0));
  for (int i = 0; i < size(); ++i)
    if (i != rank() && peer(i).state == Peer::State::gone &&
        std::ranges::find(ranks, world_rank(i)) != ranks.end())
      result.push_back(world_rank(i));
  return result;
}

Failure Mesh::abandon(Failure failure) noexcept {
  if (abandoned_) return {Cause::broken, {}};
  abandoned_ = true;
  const LastWords words{completed_, note_of(failure)};
  for (const auto& peer : peers_)  // It fits in the kernel's buffer.
    if (peer.sockets[1]) peer.sockets[1].send(&words, sizeof words);
  read_notes(in_ns(timing::mesh_farewell_ns));
  for (const auto& peer : peers_)
    if (peer.state == Peer::State::has_noted) merge(failure, failure_of(peer.words.note));
  if (failure.cause == Cause::timeout) {
    // A rank that has given up too was not late. It is named only if no other rank is.
    auto late = failure.ranks;
    std::erase_if(late, [this](int rank) { return has_noted(rank); });
    if (!late.empty()) failure.ranks = std::move(late);
  }
  std::ranges::sort(failure.ranks);
  return failure;
}

void Mesh::merge(Failure& failure, const Failure& told) {
  if (told.cause == Cause::lost && failure.cause == Cause::timeout) failure = {Cause::lost, {}};
  if (told.cause != failure.cause) return;
  for (const int rank : told.ranks) add(failure.ranks, rank);
}

bool Mesh::has_noted(int world_rank) const noexcept {
  const auto place = std::ranges::find(place_.ranks, world_rank) - place_.ranks.begin();
  return place < size() && peers_[static_cast<std::size_t>(place)].state == Peer::State::has_noted;
}

}  // namespace accelmgr::collective::tcp
