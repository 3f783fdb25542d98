// What the communicators over a network have in common: who the members are, how a call ends that cannot be
// completed, objects from one member to another, and the names of groups in the store.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/clock.hpp"
#include "collective/fork_mark.hpp"
#include "collective/gloo/mesh.hpp"
#include "collective/mailbox.hpp"
#include "collective/shared_store.hpp"
#include "collective/signature.hpp"

namespace accelmgr::collective {

class Networked : public Communicator {
 public:
  struct Setup {
    std::shared_ptr<SharedStore> store;
    std::string name;           ///< In the store; never used before.
    int rank;                   ///< Of this process among the members.
    std::vector<int> ranks;     ///< In the world, of each member.
    std::string address;        ///< This host's, numeric.
    double timeout_s;           ///< Of every call that does not say otherwise.
    double connect_timeout_s;   ///< Of coming together,
    base::Deadline connect_by;  ///< which ends then.
    std::string world;          ///< Name of that of which this is a group, or a group's group; its own.
  };

  std::string_view backend() const noexcept override { return "gloo"; }
  int rank() const noexcept override { return setup_.rank; }
  int size() const noexcept override { return static_cast<int>(setup_.ranks.size()); }
  const std::vector<int>& ranks() const noexcept override { return setup_.ranks; }

 protected:
  explicit Networked(Setup setup);

  const Setup& setup() const noexcept { return setup_; }
  std::size_t world() const noexcept { return setup_.ranks.size(); }

  /// A collective under way. The others are told when an exception ends it that they know nothing of.
  struct Call {
    Networked& communicator;
    Signature signature;
    double timeout_s;
    base::Deadline deadline;
    int exceptions = std::uncaught_exceptions();
    mutable bool ends_alike = false;  ///< What is thrown now is thrown by all members.
    Call(Networked& self, const Signature& made, double seconds)
        : communicator(self),
          signature(made),
          timeout_s(seconds),
          deadline(base::Deadline::in_seconds(seconds)) {}
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() {
      if (std::uncaught_exceptions() > exceptions && !ends_alike) communicator.give_up();
    }
  };
  Call begin(CallKind kind, std::size_t count, DType dtype, ReduceOp op, int root,
             const CallOptions& options);
  Call begin(CallKind kind, int root, const CallOptions& options) {
    return begin(kind, 0, DType::uint8, ReduceOp::sum, root, options);
  }
  /// Throws CollectiveError{mismatch} unless all members made this call.
  void check_agreement(const Call& call, const std::vector<Signature>& signatures) const;
  /// The others need not wait for this rank.
  virtual void leave(const gloo::Failure& why) noexcept = 0;
  /// The same, in the middle of a call.
  void give_up() noexcept;
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
  void check_process(std::string_view call) const;

  Setup setup_;
  Mailbox mailbox_;
  ForkMark fork_mark_;
  std::uint64_t calls_ = 0;
  std::optional<gloo::Failure> broken_;
  std::map<std::string, int> groups_;  ///< How often each was made, by its members.
};

}  // namespace accelmgr::collective
