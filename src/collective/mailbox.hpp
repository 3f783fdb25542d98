// Sends objects from one rank to another. Each ordered pair of ranks has its own connection, made when the
// first object is sent. The sender does not wait for the receiver to call as long as the kernel can buffer
// the bytes.
//
//   sender                                    receiver
//     hello {token of the receiver, rank}  ->   (the kernel accepts; the receiver does when it receives)
//     (waits until the kernel has it)
//     length, bytes, length, bytes, ...    ->
//
// A receiver that waits for its first object from a sender also connects to that sender. Nothing is ever sent
// on this connection; its end tells that the sender is gone.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "collective/not_inherited.hpp"
#include "collective/shared_store.hpp"

namespace accelmgr::collective {

/// Not thread-safe.
class Mailbox {
 public:
  /// Listens at `address`, a numeric address of this host, and publishes it in the store under NAME/RANK.
  /// Throws SystemError when it cannot listen.
  Mailbox(SharedStore& store, std::string name, int rank, const std::string& address);

  enum class Result { done, timeout, lost };

  /// send() blocks until the kernel has taken the object, receive() until the object has arrived. A result
  /// other than `done` makes the connection unusable. An interruption (base::interrupted()) is a timeout.
  /// When receive() throws because descriptors (SystemError) or memory (std::bad_alloc) are exhausted,
  /// nothing is lost: the next call receives the object.
  Result send(std::string_view object, int to, base::Deadline deadline);
  Result receive(std::string& object, int from, base::Deadline deadline);

 private:
  struct Hello {
    std::uint64_t token;
    std::int32_t rank;
    std::int32_t sends;  ///< 0: the connection only serves to notice the end of the other process.
  };
  struct Incoming {
    OwnSocket socket;
    std::optional<std::uint64_t> length;  ///< Length of the next object, once it has arrived.
  };
  Result connect(int to, bool sends, base::Deadline deadline, OwnSocket& socket);
  Result wait_for_connection(int from, base::Deadline deadline);
  void accept_one(base::Deadline deadline);

  SharedStore& store_;
  std::string name_;
  int rank_;
  std::uint64_t token_ = 0;
  OwnSocket listener_;
  std::map<int, OwnSocket> outgoing_;
  std::map<int, Incoming> incoming_;
  std::map<int, OwnSocket> watched_;  ///< Connections to senders that this rank waits for.
  std::vector<OwnSocket> watchers_;   ///< Connections from receivers that wait for this rank.
};

}  // namespace accelmgr::collective
