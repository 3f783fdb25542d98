// A mesh connects every two of its ranks and exchanges messages between them. A rank that notices a failure
// sends all others a note of what it knows before it closes its connections. So the others do not take it for
// dead.
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
#include "launcher/collective/fork_mark.hpp"
#include "launcher/collective/gloo/plugin.hpp"
#include "launcher/collective/hosts/rendezvous.hpp"

namespace accelmgr::collective::gloo {

/// Why a mesh is unusable. `ranks` are ranks in the world: missing (timeout) or lost.
struct Failure {
  CollectiveError::Cause cause;
  std::vector<int> ranks;
};

/// A failure as plain data, which processes tell each other. Has room for the first of many ranks.
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

/// All members must make the same exchanges in the same order. Not thread-safe.
class Mesh {
 public:
  struct Place {
    std::string name;        ///< Name of this mesh in the store; never used before.
    int rank;                ///< This process's rank in the mesh.
    std::vector<int> ranks;  ///< The rank in the world of each member.
    std::string address;     ///< Numeric address of this host.
    Mesh* parent = nullptr;  ///< Set if this mesh is a group of another mesh. It reports dead members while
                             ///< this mesh connects; it is not used later.
  };

  /// Blocks until all ranks are connected. Throws CollectiveError{timeout, lost}, and UsageError when the
  /// plug-in is missing. A mesh of one rank needs no plug-in.
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

  /// Sends and receives all these messages, none to or from this rank. Blocks. Every message must have its
  /// counterpart of the same length in the peer's same call. Throws ExchangeError; all connections are closed
  /// then.
  void exchange(std::span<const Send> sends, std::span<const Receive> receives, base::Deadline deadline);

  /// Returns those of `ranks` (in the world) whose processes have died or have closed this mesh. Does not
  /// block.
  std::vector<int> gone(const std::vector<int>& ranks) noexcept;

  /// Tells the other ranks why this one goes on no more, and closes all connections. Returns the failure,
  /// completed by what the others reported meanwhile.
  Failure abandon(Failure failure) noexcept;

 private:
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
    Note note{};    ///< What it sends before it closes its connections.
    Message noted;  ///< The pending receipt of that.
  };

  Message begin(int peer, std::uint64_t slot, void* data, std::size_t bytes, bool sends) noexcept;
  PluginState wait(Message& message, std::int64_t ns) noexcept;
  void connect(Rendezvous& rendezvous, base::Deadline deadline, double timeout_s);
  void meet(base::Deadline deadline, double timeout_s);
  void wait_for_all(std::vector<Message>& messages, base::Deadline deadline);
  bool has_failed(Message& message) noexcept;
  bool somebody_gave_up() noexcept;
  [[noreturn]] void give_up(std::vector<Message>& messages);
  void tell(const Failure& failure) noexcept;
  static void merge(Failure& failure, const Failure& told);
  bool has_noted(int world_rank) const noexcept;
  int world_rank(int peer) const noexcept { return place_.ranks[static_cast<std::size_t>(peer)]; }
  void close() noexcept;

  Place place_;
  const Plugin* plugin_;
  std::unique_ptr<PluginMesh, FreeMesh> mesh_;
  std::vector<std::unique_ptr<Peer>> peers_;  ///< Null for this rank.
  ForkMark fork_mark_;
  std::uint64_t exchanges_ = 0;
  bool closed_ = false;
};

}  // namespace accelmgr::collective::gloo
