#include "launcher/collective/gloo/mesh.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/interruption.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "launcher/collective/gloo/load.hpp"
#include "launcher/collective/signature/checks.hpp"

namespace accelmgr::collective::gloo {
namespace {

using Cause = CollectiveError::Cause;

/// Longer messages are cut: gloo counts some lengths in 32 bits.
constexpr std::size_t most_message_bytes = std::size_t{1} << 28;
constexpr std::uint64_t note_slot = ~std::uint64_t{0};

double seconds(std::int64_t ns) noexcept { return static_cast<double>(std::max<std::int64_t>(ns, 0)) / 1e9; }

void add(std::vector<int>& ranks, int rank) {
  if (std::ranges::find(ranks, rank) == ranks.end()) ranks.push_back(rank);
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

Mesh::Mesh(SharedStore& store, Place place, double timeout_s, base::Deadline deadline)
    : place_(std::move(place)),
      plugin_(size() == 1 ? nullptr : &plugin()),
      mesh_(nullptr, FreeMesh{plugin_}) {
  if (size() == 1) {
    peers_.resize(1);
    return;
  }
  Rendezvous rendezvous(store, place_.name, timeout_s, deadline, [this] {
    return place_.parent != nullptr ? place_.parent->gone(place_.ranks) : std::vector<int>();
  });
  rendezvous.attempt([&] { connect(rendezvous, deadline, timeout_s); });
  place_.parent = nullptr;
}

void Mesh::connect(Rendezvous& rendezvous, base::Deadline deadline, double timeout_s) {
  PluginError error{};
  const auto check = [&](bool succeeded) {
    if (!succeeded)
      throw CollectiveError(
          fmt::format("rank {} at {} could not connect to the other ranks of '{}' within {:g} s: {}",
                      world_rank(place_.rank), place_.address, place_.name, timeout_s, error.text),
          deadline.passed() ? Cause::timeout : Cause::lost, {});
  };
  mesh_.reset(
      plugin_->create(place_.address.c_str(), place_.rank, size(), seconds(deadline.remaining_ns()), &error));
  check(mesh_ != nullptr);
  std::size_t bytes = 0;
  const auto* own = plugin_->addresses(mesh_.get(), &bytes);
  const auto all = rendezvous.exchange(place_.rank, place_.ranks, std::string(own, bytes));
  for (int peer = 0; peer < size(); ++peer) {
    const auto& theirs = all[static_cast<std::size_t>(peer)];
    check(peer == place_.rank || plugin_->connect(mesh_.get(), peer, theirs.data(), theirs.size(), &error));
  }
  for (int peer = 0; peer < size(); ++peer) {
    auto& added = peers_.emplace_back();
    if (peer == place_.rank) continue;
    added = std::make_unique<Peer>();
    added->noted = begin(peer, note_slot, &added->note, sizeof added->note, false);
  }
  meet(deadline, timeout_s);
}

// gloo can connect to a peer that has not yet accepted the connection. No rank may leave and close before all
// have accepted theirs.
void Mesh::meet(base::Deadline deadline, double timeout_s) {
  std::vector<char> hellos(place_.ranks.size());
  std::vector<Send> sends;
  std::vector<Receive> receives;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == place_.rank) continue;
    sends.push_back({peer, &hellos[static_cast<std::size_t>(place_.rank)], 1});
    receives.push_back({peer, &hellos[static_cast<std::size_t>(peer)], 1});
  }
  try {
    exchange(sends, receives, deadline);
  } catch (const ExchangeError& error) {
    throw CollectiveError(
        fmt::format("the ranks of '{}' did not all connect within {:g} s: rank {} waited for {}", place_.name,
                    timeout_s, world_rank(place_.rank), names_of(error.failure().ranks)),
        error.failure().cause, error.failure().ranks);
  }
}

Mesh::~Mesh() { close(); }

Mesh::Message Mesh::begin(int peer, std::uint64_t slot, void* data, std::size_t bytes, bool sends) noexcept {
  PluginError error;
  auto* handle = plugin_->begin(mesh_.get(), peer, slot, data, bytes, sends, &error);
  return {peer, sends, handle == nullptr ? plugin_failed : plugin_pending, {handle, FreeMessage{plugin_}}};
}

PluginState Mesh::wait(Message& message, std::int64_t ns) noexcept {
  if (message.state != plugin_pending) return message.state;
  PluginError error;
  message.state = plugin_->wait(message.handle.get(), seconds(ns), &error);
  if (message.state == plugin_failed)
    base::log().debug("gloo: the connection to rank {} failed: {}", world_rank(message.peer), error.text);
  return message.state;
}

void Mesh::exchange(std::span<const Send> sends, std::span<const Receive> receives, base::Deadline deadline) {
  if (closed_) throw ExchangeError({Cause::broken, {}});
  const auto slot = exchanges_++;
  std::vector<Message> messages;
  const auto begin_all = [&](int peer, void* data, std::size_t bytes, bool sends_it) {
    for (std::size_t at = 0; at < bytes; at += most_message_bytes)
      messages.push_back(begin(peer, slot, static_cast<std::byte*>(data) + at,
                               std::min(most_message_bytes, bytes - at), sends_it));
  };
  for (const auto& receive : receives) begin_all(receive.from, receive.data, receive.bytes, false);
  for (const auto& send : sends) begin_all(send.to, const_cast<void*>(send.data), send.bytes, true);
  wait_for_all(messages, deadline);
}

void Mesh::wait_for_all(std::vector<Message>& messages, base::Deadline deadline) {
  for (auto& message : messages) {
    while (wait(message, std::min(timing::mesh_look_ns, deadline.remaining_ns())) == plugin_pending) {
      const auto failed = [this](Message& other) { return has_failed(other); };
      if (deadline.passed() || base::interrupted() || somebody_gave_up() ||
          std::ranges::any_of(messages, failed))
        give_up(messages);
    }
    if (message.state == plugin_failed) give_up(messages);
  }
}

// gloo does not report a message that a broken connection cut short. But the receipt of the peer's note is
// always pending, and it fails when the connection breaks. It fails only after all earlier bytes were taken
// in.
bool Mesh::has_failed(Message& message) noexcept {
  const bool disconnected = wait(peers_[static_cast<std::size_t>(message.peer)]->noted, 0) == plugin_failed;
  const auto state = wait(message, 0);
  return state == plugin_failed || (disconnected && state == plugin_pending);
}

// A peer that is gone without a note may have completed its part.
bool Mesh::somebody_gave_up() noexcept {
  return std::ranges::any_of(
      peers_, [this](const auto& peer) { return peer && wait(peer->noted, 0) == plugin_done; });
}

void Mesh::give_up(std::vector<Message>& messages) {
  Failure failure{Cause::timeout, {}};
  // A peer that is gone but has no message pending has completed its part.
  for (auto& message : messages) {
    const auto state = wait(message, 0);
    if (state == plugin_done) continue;
    // If the message has failed, the note will fail too in a moment.
    auto& noted = peers_[static_cast<std::size_t>(message.peer)]->noted;
    if (wait(noted, state == plugin_failed ? timing::mesh_farewell_ns : 0) != plugin_failed) continue;
    failure.cause = Cause::lost;
    add(failure.ranks, world_rank(message.peer));
  }
  // Blame the ranks whose messages are missing; if none is, the ranks that have not received ours.
  for (const bool sends : {false, true}) {
    if (!failure.ranks.empty()) break;
    for (const auto& message : messages)
      if (message.sends == sends && message.state == plugin_pending)
        add(failure.ranks, world_rank(message.peer));
  }
  failure = abandon(std::move(failure));
  messages.clear();
  throw ExchangeError(std::move(failure));
}

void Mesh::tell(const Failure& failure) noexcept {
  auto note = note_of(failure);
  std::vector<Message> told;
  for (auto& peer : peers_)
    if (peer && wait(peer->noted, 0) != plugin_failed)
      told.push_back(begin(peer->noted.peer, note_slot, &note, sizeof note, true));
  // The others have waited for the note from the beginning, so it leaves as soon as the bytes before it. No
  // connection may be closed before the note is sent: a rank that closes without one is taken for dead.
  const auto told_by = base::Deadline::at_ns(base::now_ns() + timing::mesh_telling_ns);
  for (auto& message : told) wait(message, told_by.remaining_ns());
  const auto deadline = base::Deadline::at_ns(base::now_ns() + timing::mesh_farewell_ns);
  for (auto& peer : peers_)
    if (peer) wait(peer->noted, deadline.remaining_ns());
  if (mesh_) plugin_->close(mesh_.get());
}

std::vector<int> Mesh::gone(const std::vector<int>& ranks) noexcept {
  std::vector<int> result;
  for (auto& peer : peers_)
    if (!closed_ && peer && wait(peer->noted, 0) == plugin_failed &&
        std::ranges::find(ranks, world_rank(peer->noted.peer)) != ranks.end())
      result.push_back(world_rank(peer->noted.peer));
  return result;
}

Failure Mesh::abandon(Failure failure) noexcept {
  if (closed_) return {Cause::broken, {}};
  tell(failure);
  closed_ = true;
  for (auto& peer : peers_)
    if (peer && peer->noted.state == plugin_done) merge(failure, failure_of(peer->note));
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
  return std::ranges::any_of(peers_, [&](const auto& peer) {
    return peer && peer->noted.state == plugin_done && this->world_rank(peer->noted.peer) == world_rank;
  });
}

void Mesh::close() noexcept {
  if (!mesh_) return;
  if (fork_mark_.inherited()) {  // gloo's thread belongs to the parent; freeing here would also remove what
                                 // that thread watches.
    for (auto& peer : peers_)
      if (peer) static_cast<void>(peer->noted.handle.release());
    static_cast<void>(mesh_.release());
    return;
  }
  plugin_->close(mesh_.get());
  closed_ = true;
  peers_.clear();
}

}  // namespace accelmgr::collective::gloo
