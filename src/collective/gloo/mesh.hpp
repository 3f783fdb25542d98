// A connection between any two of some ranks, over which they exchange messages; and what happens when one of
// them is gone: who notices tells all others what it knows before it closes its connections, so that a rank
// which has closed them is not taken for one that has died.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/clock.hpp"
#include "collective/fork_mark.hpp"
#include "collective/gathering.hpp"
#include "collective/gloo/plugin.hpp"

namespace accelmgr::collective::gloo {

/// Why a mesh is of no use any more. `ranks`: of the world; missing (timeout) or lost.
struct Failure {
  CollectiveError::Cause cause;
  std::vector<int> ranks;
};

/// Thrown when an exchange cannot be completed; who calls knows what it was for.
class ExchangeError : public Error {
 public:
  explicit ExchangeError(Failure failure) : Error("the exchange failed"), failure_(std::move(failure)) {}
  const Failure& failure() const noexcept { return failure_; }

 private:
  Failure failure_;
};

/// All members make the same exchanges in the same order. One thread at a time.
class Mesh {
 public:
  struct Place {
    std::string name;        ///< Of this mesh in the store; never used before.
    int rank;                ///< Of this process in the mesh.
    std::vector<int> ranks;  ///< In the world, of each member.
    std::string address;     ///< This host's, numeric.
    Mesh* parent = nullptr;  ///< Of which this is a group, while it is made: it tells of members that died.
  };

  /// Blocks until all are connected. Throws CollectiveError{timeout, lost}, UsageError without the plug-in,
  /// which a mesh of one does not need.
  Mesh(SharedStore& store, Place place, double timeout_s, base::Deadline deadline);
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;
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

  /// Sends and receives all that; none to or from itself. For each message there is one of the same length at
  /// its other end, in the same call. Throws ExchangeError; afterwards all connections are closed.
  void exchange(std::span<const Send> sends, std::span<const Receive> receives, base::Deadline deadline);

  /// Of `ranks`, in the world: whose processes have died, or have let go of this mesh.
  std::vector<int> gone(const std::vector<int>& ranks) noexcept;

  /// Tells the others why this rank goes on no more, and closes. Returns what all of them know by then.
  Failure abandon(Failure failure) noexcept;

 private:
  /// What a rank says before it closes its connections.
  struct Note {
    CollectiveError::Cause cause;
    std::uint32_t count;
    std::array<std::int32_t, 126> ranks;
  };
  struct FreeMessage {
    const Plugin* plugin;
    void operator()(PluginMessage* message) const noexcept { plugin->free_message(message); }
  };
  struct FreeMesh {
    const Plugin* plugin;
    void operator()(PluginMesh* mesh) const noexcept { plugin->free_mesh(mesh); }
  };
  struct Message {
    int peer;
    bool sends;
    PluginState state;
    std::unique_ptr<PluginMessage, FreeMessage> handle;
  };
  struct Peer {
    Note note{};
    Message noted;  ///< The receipt of its note.
  };

  Message begin(int peer, std::uint64_t slot, void* data, std::size_t bytes, bool sends) noexcept;
  PluginState wait(Message& message, std::int64_t ns) noexcept;
  void connect(Gathering& gathering, base::Deadline deadline, double timeout_s);
  void meet(base::Deadline deadline, double timeout_s);
  void wait_for_all(std::vector<Message>& messages, base::Deadline deadline);
  bool has_failed(Message& message) noexcept;
  bool somebody_gave_up() noexcept;
  [[noreturn]] void give_up(std::vector<Message>& messages);
  void tell(const Failure& failure) noexcept;
  static void merge(Failure& failure, const Note& note);
  bool has_noted(int world_rank) const noexcept;
  int world_rank(int peer) const noexcept { return place_.ranks[static_cast<std::size_t>(peer)]; }
  void close() noexcept;

  Place place_;
  const Plugin* plugin_;
  std::unique_ptr<PluginMesh, FreeMesh> mesh_;
  std::vector<std::unique_ptr<Peer>> peers_;  ///< Null: this rank.
  ForkMark fork_mark_;
  std::uint64_t exchanges_ = 0;
  bool closed_ = false;
};

}  // namespace accelmgr::collective::gloo
