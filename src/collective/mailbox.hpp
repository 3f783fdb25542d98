// Objects from one rank to another, over a connection of their own that is made when the first is sent: the
// sender needs nobody at the other end for as much as the kernel takes in.
//
//   sender                                    receiver
//     hello {token of the receiver, rank}  ->   (the kernel accepts; the receiver does when it receives)
//     (waits until the kernel has it)
//     length, bytes, length, bytes, ...    ->
//
// Who waits for an object holds a connection to its sender, on which nothing comes but its end.
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

/// One thread at a time.
class Mailbox {
 public:
  /// Listens at `address`, a numeric one of this host, and says so in the store, under NAME/RANK.
  Mailbox(SharedStore& store, std::string name, int rank, const std::string& address);

  enum class Result { done, timeout, lost };

  /// Once it was not done, the connection is of no use any more. An interruption (base::interrupted()) is a
  /// timeout. What receive() has no descriptor or no memory for (SystemError, std::bad_alloc) is received by
  /// the next call.
  Result send(std::string_view object, int to, base::Deadline deadline);
  Result receive(std::string& object, int from, base::Deadline deadline);

 private:
  struct Hello {
    std::uint64_t token;
    std::int32_t rank;
    std::int32_t sends;  ///< 0: it only wants to know when we are gone.
  };
  struct Incoming {
    OwnSocket socket;
    std::optional<std::uint64_t> length;  ///< Of the next object, once it has come.
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
  std::map<int, OwnSocket> watched_;  ///< To those that we wait for.
  std::vector<OwnSocket> watchers_;   ///< Of those that wait for us.
};

}  // namespace accelmgr::collective
