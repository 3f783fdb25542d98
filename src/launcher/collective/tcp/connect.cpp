// How the ranks of a mesh connect. Each listens, publishes its address, and connects to the ranks below it.
#include <fmt/format.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "base/fnv1a.hpp"
#include "base/interruption.hpp"
#include "base/ipc/wait_ready.hpp"
#include "base/timing.hpp"
#include "launcher/collective/signature/argument_checks.hpp"
#include "launcher/collective/tcp/mesh.hpp"

namespace accelmgr::collective::tcp {
namespace {

using Cause = CollectiveError::Cause;

/// The first bytes on a connection: who connects, and which of the two connections it is.
struct Hello {
  std::uint64_t mesh;  ///< Hash of its name.
  std::int32_t rank;
  std::uint32_t use;  ///< Index in Peer::sockets.
};

}  // namespace

Mesh::Mesh(SharedStore& store, Place place, double timeout_s, base::Deadline deadline)
    : place_(std::move(place)), peers_(place_.ranks.size()) {
  peer(rank()).state = Peer::State::gone;
  if (size() == 1) return;
  Rendezvous rendezvous(store, place_.name, timeout_s, deadline, [this] {
    return place_.parent != nullptr ? place_.parent->gone(place_.ranks) : std::vector<int>();
  });
  Socket listener;  // Stays open until the others can read why this rank gives up.
  rendezvous.attempt([&] {
    try {
      listener = Socket::listening(place_.address);
      connect(rendezvous, listener, deadline);
      meet(deadline, timeout_s);
    } catch (const CollectiveError&) {
      rendezvous.look();  // Another rank may know more.
      throw;
    } catch (const SystemError& error) {
      throw CollectiveError(fmt::format("rank {} at {} could not connect to the other ranks of '{}': {}",
                                        world_rank(rank()), place_.address, place_.name, error.what()),
                            Cause::lost, {world_rank(rank())});
    }
  });
  place_.parent = nullptr;
}

void Mesh::connect(Rendezvous& rendezvous, const Socket& listener, base::Deadline deadline) {
  const auto names = rendezvous.exchange(rank(), place_.ranks, listener.name());
  for (int i = 0; i < rank(); ++i) try {
      for (std::uint32_t use = 0; use < peer(i).sockets.size(); ++use) {
        peer(i).sockets[use] = Socket::connected(names[static_cast<std::size_t>(i)], deadline);
        const Hello hello{base::fnv1a(place_.name), rank(), use};
        peer(i).sockets[use].send(&hello, sizeof hello);
      }
    } catch (const SystemError& error) {
      throw CollectiveError(
          fmt::format("rank {} at {} could not connect to rank {} for '{}': {}", world_rank(rank()),
                      place_.address, world_rank(i), place_.name, error.what()),
          deadline.passed() ? Cause::timeout : Cause::lost, {world_rank(i)});
    }
  accept_peers(rendezvous, listener, deadline);
}

void Mesh::accept_peers(Rendezvous& rendezvous, const Socket& listener, base::Deadline deadline) {
  while (!unconnected().empty()) {
    ipc::wait_ready(listener.fd(), POLLIN,
                    base::earlier(deadline, base::Deadline::at_ns(base::now_ns() + timing::store_look_ns)));
    if (auto socket = listener.accept())
      take_in(std::move(socket), deadline);
    else if (deadline.passed() || base::interrupted())
      return;  // meet() names them.
    else
      rendezvous.look();
  }
}

/// Keeps the connection if a member made it, and drops it otherwise. Waits a bounded time for its first
/// bytes.
void Mesh::take_in(Socket socket, base::Deadline deadline) {
  Hello hello{};
  const auto until = base::earlier(deadline, base::Deadline::in_seconds(timing::connect_s));
  ipc::wait_ready(socket.fd(), POLLIN, until);
  if (socket.receive(&hello, sizeof hello) != sizeof hello || hello.mesh != base::fnv1a(place_.name) ||
      hello.rank <= rank() || hello.rank >= size() || hello.use >= peer(hello.rank).sockets.size())
    return;
  peer(hello.rank).sockets[hello.use] = std::move(socket);
}

std::vector<int> Mesh::unconnected() const {
  std::vector<int> ranks;
  for (int i = 0; i < size(); ++i) {
    const auto& sockets = peers_[static_cast<std::size_t>(i)].sockets;
    if (i != place_.rank && std::ranges::any_of(sockets, [](const Socket& one) { return !one; }))
      ranks.push_back(world_rank(i));
  }
  return ranks;
}

// A connection can be made before the peer accepts it. No rank may return before all have accepted theirs.
void Mesh::meet(base::Deadline deadline, double timeout_s) {
  Failure failure{Cause::timeout, unconnected()};
  if (failure.ranks.empty()) try {
      std::vector<char> bytes(place_.ranks.size());
      std::vector<Send> sends;
      std::vector<Receive> receives;
      for (int i = 0; i < size(); ++i) {
        if (i == rank()) continue;
        sends.push_back({i, &bytes[static_cast<std::size_t>(rank())], 1});
        receives.push_back({i, &bytes[static_cast<std::size_t>(i)], 1});
      }
      return exchange(sends, receives, deadline);
    } catch (const ExchangeError& error) {
      failure = error.failure();
    }
  throw CollectiveError(
      fmt::format("the ranks of '{}' did not all connect within {:g} s: rank {} waited for {}", place_.name,
                  timeout_s, world_rank(rank()), names_of(failure.ranks)),
      failure.cause, failure.ranks);
}

}  // namespace accelmgr::collective::tcp
