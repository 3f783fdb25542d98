// What the communicators over a network have in common: who the members are, how a call ends that cannot be
// completed, objects from one member to another, and the names of groups in the store.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/clock.hpp"
#include "collective/gloo/mesh.hpp"
#include "collective/mailbox.hpp"
#include "collective/shared_store.hpp"
#include "collective/signature.hpp"

namespace accelmgr::collective {

class Networked : public Communicator {
 public:
  struct Setup {
    std::shared_ptr<SharedStore> store;
    std::string name;          ///< In the store; never used before.
    int rank;                  ///< Of this process among the members.
    std::vector<int> ranks;    ///< In the world, of each member.
    std::string address;       ///< This host's, numeric.
    double timeout_s;          ///< Of every call that does not say otherwise.
    double connect_timeout_s;  ///< Of coming together.
    std::string world;         ///< Name of that of which this is a group, or a group's group; its own.
  };

  std::string_view backend() const noexcept override { return "gloo"; }
  int rank() const noexcept override { return setup_.rank; }
  int size() const noexcept override { return static_cast<int>(setup_.ranks.size()); }
  const std::vector<int>& ranks() const noexcept override { return setup_.ranks; }

 protected:
  explicit Networked(Setup setup);

  const Setup& setup() const noexcept { return setup_; }
  std::size_t world() const noexcept { return setup_.ranks.size(); }

  /// A collective under way.
  struct Call {
    Signature signature;
    double timeout_s;
    base::Deadline deadline;
  };
  Call begin(CallKind kind, std::size_t count, DType dtype, ReduceOp op, int root,
             const CallOptions& options);
  Call begin(CallKind kind, int root, const CallOptions& options) {
    return begin(kind, 0, DType::uint8, ReduceOp::sum, root, options);
  }
  /// After send() or receive() has failed: the others need not wait for this rank.
  virtual void leave(const gloo::Failure& why) noexcept = 0;
  /// Notes that this communicator is of no use any more, and says why.
  [[noreturn]] void fail(const Call& call, gloo::Failure failure);

  void check_member(int rank, const char* what) const;
  void check_peer(int rank) const;  ///< Nor this rank.
  double timeout_of(const CallOptions& options) const noexcept {
    return options.timeout_s > 0 ? options.timeout_s : setup_.timeout_s;
  }

  void send_over_network(std::string_view object, int to, const CallOptions& options);
  std::string receive_over_network(int from, const CallOptions& options);

  /// The setup of a group; throws UsageError unless `ranks` are as group() wants them.
  Setup setup_of_group(std::span<const int> ranks, const CallOptions& options);

 private:
  void check_transfer(Mailbox::Result result, const std::string& what, int peer, double timeout_s);
  void check_usable(const std::string& what) const;

  Setup setup_;
  Mailbox mailbox_;
  std::uint64_t calls_ = 0;
  std::optional<gloo::Failure> broken_;
  std::map<std::string, int> groups_;  ///< How often each was made, by its members.
};

}  // namespace accelmgr::collective
