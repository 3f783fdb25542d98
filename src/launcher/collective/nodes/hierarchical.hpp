// The communicator over several nodes. The ranks of one node work together in shared memory. One rank of each
// node, its leader, exchanges data with the other leaders over TCP and passes the result to its node.
//
//   all ranks      exchange the signatures of the call        local all_gather
//   leaders        exchange the signatures of all ranks       TCP
//   all ranks      the leader's verdict                       local broadcast; all ranks agree
//   all ranks      data of the node                           local
//   leaders        data of all nodes                          TCP    these three once for each part
//   all ranks      the leader's verdict, result               local
//
// The other ranks of a node see nothing of the network. So every exchange between leaders ends with a
// verdict, which the leader broadcasts to its node. A leader tells the other leaders of failures on its own
// node.
//
// A reduction combines the ranks of each node in their order, then the nodes in the order of their lowest
// ranks. All ranks get the same bits.
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
#include "base/timing.hpp"
#include "base/unmovable.hpp"
#include "launcher/collective/fork_mark.hpp"
#include "launcher/collective/rendezvous/shared_store.hpp"
#include "launcher/collective/signature/signature.hpp"
#include "launcher/collective/tcp/mesh.hpp"

namespace accelmgr::collective {

/// Which member is on which node.
struct NodeLayout {
  std::vector<std::vector<int>> nodes;  ///< Members, ascending; nodes in the order of their lowest ones.
  std::size_t node = 0;                 ///< Index of this rank's node.
  std::size_t local = 0;  ///< Index of this rank among the members of its node. 0 is the leader.

  NodeLayout(std::vector<std::vector<int>> nodes, int rank);
  std::size_t node_of(int member) const noexcept;
  std::size_t local_of(int member) const noexcept;
};

class Hierarchical final : public Communicator {
 public:
  struct Setup {
    std::shared_ptr<SharedStore> store;
    std::string name;           ///< Prefix of the keys in the store; never used before.
    int rank;                   ///< This process's index among the members.
    std::vector<int> ranks;     ///< The rank in the world of each member.
    std::string address;        ///< Numeric address of this node.
    double timeout_s;           ///< Of every call whose options give none.
    double connect_timeout_s;   ///< Of connecting; for error texts.
    base::Deadline connect_by;  ///< Deadline of connecting.
    std::string world;  ///< Name of the world from which this group descends; of a world, its own name.
  };

  /// `local` is the communicator of this node's members, in their order. `parent` is set
  /// for a group: the mesh that its leaders belong to. Blocks until all nodes are connected.
  Hierarchical(Setup setup, NodeLayout layout, std::shared_ptr<Communicator> local,
               tcp::Mesh* parent = nullptr);

  /// The name in the store under which the leaders meet.
  static std::string leaders_of(const std::string& name) { return name + "/leaders"; }

  std::string_view backend() const noexcept override { return "gloo"; }
  int rank() const noexcept override { return setup_.rank; }
  int size() const noexcept override { return static_cast<int>(setup_.ranks.size()); }
  const std::vector<int>& ranks() const noexcept override { return setup_.ranks; }
  std::vector<int> gone() override { return local_->gone(); }

  void all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                  const CallOptions& options) override;
  void reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                      const CallOptions& options) override;
  void all_gather(const void* in, void* out, std::size_t count, DType dtype,
                  const CallOptions& options) override;
  void broadcast(void* data, std::size_t count, DType dtype, int root, const CallOptions& options) override;
  void all_to_all(const void* in, void* out, std::size_t count, DType dtype,
                  const CallOptions& options) override;
  void barrier(const CallOptions& options) override;
  std::vector<std::string> all_gather_objects(std::string_view object, const CallOptions& options) override;
  std::string broadcast_object(std::string_view object, int root, const CallOptions& options) override;
  std::shared_ptr<Communicator> group(std::span<const int> ranks, const CallOptions& options) override;

 private:
  /// A collective under way. If an exception that the other members do not know of ends it, the destructor
  /// makes this member give up, so that they do not wait.
  struct Call : base::Unmovable {
    Hierarchical& communicator;
    Signature signature;
    double timeout_s;
    base::Deadline deadline;
    int exceptions = std::uncaught_exceptions();
    mutable bool ends_alike = false;  ///< All members throw this error, so the communicator stays usable.
    Call(Hierarchical& self, const Signature& made, double seconds)
        : communicator(self),
          signature(made),
          timeout_s(seconds),
          deadline(base::Deadline::in_seconds(seconds)) {}
    ~Call() {
      if (std::uncaught_exceptions() > exceptions && !ends_alike) communicator.give_up();
    }
  };

  /// How an exchange between leaders ended, as a leader tells the ranks of its node.
  struct Verdict {
    enum class Kind : std::uint32_t { go_on, differ, failed } kind = Kind::go_on;
    tcp::Note failure{};
  };

  std::size_t world() const noexcept { return setup_.ranks.size(); }
  bool leads() const noexcept { return layout_.local == 0; }
  std::size_t locals() const noexcept { return layout_.nodes[layout_.node].size(); }
  /// For each node: the number of its members times `unit`.
  std::vector<std::size_t> per_node(std::size_t unit) const;

  double timeout_of(const CallOptions& options) const noexcept {
    return options.timeout_s > 0 ? options.timeout_s : setup_.timeout_s;
  }

  void connect(tcp::Mesh* parent);

  Call begin(CallKind kind, std::size_t count, DType dtype, ReduceOp op, int root,
             const CallOptions& options);
  Call begin(CallKind kind, int root, const CallOptions& options) {
    return begin(kind, 0, DType::uint8, ReduceOp::sum, root, options);
  }
  /// Tells the other members that this rank goes on no more, so that they do not wait for it.
  void leave(const tcp::Failure& why) noexcept;
  /// Marks the communicator broken and leaves, in the middle of a call. Does nothing if it is broken already.
  void give_up() noexcept;
  /// Marks the communicator broken and throws CollectiveError for `failure`.
  [[noreturn]] void fail(const Call& call, tcp::Failure failure);

  void check_process(std::string_view call) const;

  /// Blocks until all members have made this call. Throws CollectiveError{mismatch} when they differ.
  void agree(const Call& call);
  /// The steps of an all_reduce of `count` elements, whose dtype and reduction are those of the call.
  void reduce(const Call& call, const void* in, void* out, std::size_t count);
  /// Returns step(local, options) in the middle of a call, with the call's deadline plus `margin_ns`. If it
  /// throws CollectiveError, this member leaves and fails the call.
  template <class Step>
  auto locally(const Call& call, Step&& step, std::int64_t margin_ns = timing::leader_margin_ns);
  /// Leaders call exchange(mesh). Then all ranks of the node share how it ended; throws if it failed.
  template <class Exchange>
  void between_nodes(const Call& call, Exchange&& exchange);
  /// Like between_nodes(). exchange(mesh) returns whether the calls of the nodes differ, and so does this.
  template <class Exchange>
  bool nodes_differ(const Call& call, Exchange&& exchange);
  void share(const Call& call, void* data, std::size_t bytes);
  tcp::Failure whole_nodes(tcp::Failure failure) const;

  /// The setup of a group.
  Setup setup_of_group(std::span<const int> ranks, const CallOptions& options);

  Setup setup_;
  NodeLayout layout_;
  std::vector<int> order_;          ///< All members, node by node.
  std::vector<std::size_t> bases_;  ///< Where each node begins in order_.
  std::shared_ptr<Communicator> local_;
  std::optional<tcp::Mesh> mesh_;  ///< Leaders only.
  ForkMark fork_mark_;
  std::uint64_t calls_ = 0;
  std::optional<tcp::Failure> broken_;
  std::map<std::string, int> groups_;  ///< How many groups of each list of members were made.
};

}  // namespace accelmgr::collective
