// A mesh connects every two of its ranks by TCP and exchanges messages between them. Two connections lead to
// each peer: one for messages, one for the note in which a rank that gives up says why. A rank whose
// connections end without a note counts as dead.
//
// gloo is not used, because it does not keep what backends promise: its errors name no rank, a forked child
// keeps its sockets open and hides a death, and its ring sums in an order that differs from part to part (a
// fifth of the float32 sums of three ranks had other bits than in order of rank).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/clock.hpp"
#include "base/unmovable.hpp"
#include "launcher/collective/fork_mark.hpp"
#include "launcher/collective/rendezvous/rendezvous.hpp"
#include "launcher/collective/tcp/socket.hpp"

namespace accelmgr::collective::tcp {

/// Why a mesh is unusable. `ranks` are ranks in the world: missing (timeout) or lost.
struct Failure {
  CollectiveError::Cause cause;
  std::vector<int> ranks;
};

/// A failure as plain data, which processes tell each other. If there are many ranks, it has only the first.
struct Note {
  CollectiveError::Cause cause;
  std::uint32_t count;
  std::array<std::int32_t, 126> ranks;
};
Note note_of(const Failure& failure) noexcept;
Failure failure_of(const Note& note);

/// Thrown when an exchange cannot be completed. The caller adds which call it was.
class ExchangeError : public Error {
 public:
  explicit ExchangeError(Failure failure) : Error("the exchange failed"), failure_(std::move(failure)) {}
  const Failure& failure() const noexcept { return failure_; }

 private:
  Failure failure_;
};

/// All members must make the same exchanges in the same order. Not thread-safe. In a forked child it may only
/// be destroyed.
class Mesh : base::Unmovable {
 public:
  struct Place {
    std::string name;        ///< Name of this mesh in the store; never used before.
    int rank;                ///< This process's rank in the mesh.
    std::vector<int> ranks;  ///< The rank in the world of each member.
    std::string address;     ///< Numeric address of this node.
    Mesh* parent = nullptr;  ///< Set if this mesh is a group of another mesh. It reports dead members while
                             ///< this mesh connects; it is not used later.
  };

  /// Blocks until all ranks are connected. Throws CollectiveError{timeout, lost}, and as ipc::bind_tcp().
  Mesh(SharedStore& store, Place place, double timeout_s, base::Deadline deadline);
  ~Mesh();

  int rank() const noexcept { return place_.rank; }
  int size() const noexcept { return static_cast<int>(place_.ranks.size()); }

  struct Send {
    int to;
    const void* data;
    std::size_t bytes;
  };
  struct Receive {
    int from;
    void* data;
    std::size_t bytes;
  };

  /// Sends and receives all these messages: at most one to and one from each other rank. Blocks until all are
  /// received, and the kernel has those that are sent. Every message must have its counterpart of the same
  /// length in the peer's same call. Throws ExchangeError; the mesh cannot be used afterwards.
  void exchange(std::span<const Send> sends, std::span<const Receive> receives, base::Deadline deadline);

  /// Returns those of `ranks` (in the world) whose processes have died or have destroyed this mesh. Does not
  /// block.
  std::vector<int> gone(const std::vector<int>& ranks) noexcept;

  /// Tells the other ranks why this one goes on no more. Returns the failure, completed by what the others
  /// reported meanwhile. The connections stay open until the mesh is destroyed.
  Failure abandon(Failure failure) noexcept;

 private:
  /// What a rank that gives up sends to the others.
  struct LastWords {
    std::uint64_t completed;  ///< How many exchanges it has completed.
    Note note;
  };
  struct Peer {
    enum class State { connected, has_noted, gone } state = State::connected;
    std::array<Socket, 2> sockets{};  ///< For messages, for notes.
    LastWords words{};                ///< Complete in the state has_noted.
    std::size_t words_bytes = 0;      ///< How much of them has come.
  };
  struct Transfer {
    int peer;
    bool sends;
    std::byte* next;
    std::size_t left;
    bool lost = false;  ///< The connection has ended.
  };

  void connect(Rendezvous& rendezvous, const Socket& listener, base::Deadline deadline);
  void accept_peers(Rendezvous& rendezvous, const Socket& listener, base::Deadline deadline);
  void take_in(Socket socket, base::Deadline deadline);
  void meet(base::Deadline deadline, double timeout_s);
  std::vector<int> unconnected() const;

  void move(Transfer& transfer) noexcept;
  void wait_for(std::span<const Transfer> transfers, base::Deadline until) noexcept;
  void read_note(Peer& peer) noexcept;
  void read_notes(base::Deadline deadline) noexcept;
  /// Whether a peer has given up before it completed its part in the exchange under way.
  bool somebody_gave_up() const noexcept;
  [[noreturn]] void give_up(std::vector<Transfer>& transfers);
  static void merge(Failure& failure, const Failure& told);
  bool has_noted(int world_rank) const noexcept;
  int world_rank(int peer) const noexcept { return place_.ranks[static_cast<std::size_t>(peer)]; }
  Peer& peer(int rank) noexcept { return peers_[static_cast<std::size_t>(rank)]; }

  Place place_;
  std::vector<Peer> peers_;  ///< This rank's entry has no sockets and is `gone`.
  ForkMark fork_mark_;
  std::uint64_t completed_ = 0;  ///< How many exchanges this rank has completed.
  bool abandoned_ = false;
};

}  // namespace accelmgr::collective::tcp
