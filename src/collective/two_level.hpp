// Several hosts: what the ranks of one host do together they do in shared memory; one of each host, its
// leader, does what is between hosts, over gloo, and gives the others the result.
//
//   all ranks      what were you called with?          local all_gather
//   leaders        has your host been called so too?   gloo
//   all ranks      verdict of their leader             local broadcast; here all have come and agree
//   all ranks      data of the host                    local
//   leaders        data of all hosts                   gloo     these three once for each part of the data
//   all ranks      verdict, result                     local
//
// Every stretch of a leader's between hosts ends with a verdict, so that the others of its host, who see
// nothing of the network, end with it. What a leader learns from its host it tells the other leaders.
//
// A reduction combines the ranks of each host in their order, then the hosts in the order of their lowest
// ranks. All ranks get the same bits.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "collective/gloo/mesh.hpp"
#include "collective/networked.hpp"

namespace accelmgr::collective {

/// Which member is on which host.
struct HostLayout {
  std::vector<std::vector<int>> hosts;  ///< Members, ascending; hosts in the order of their first ones.
  std::size_t host = 0;                 ///< Of this rank,
  std::size_t local = 0;                ///< and its place there. 0 leads.

  HostLayout(std::vector<std::vector<int>> hosts, int rank);
  std::size_t host_of(int member) const noexcept;
  std::size_t local_of(int member) const noexcept;
};

class TwoLevel final : public Networked {
 public:
  /// `local`: the communicator of this host's members, in their order. Blocks until all hosts are connected.
  /// `parent`: of a group, the mesh of which its leaders are.
  TwoLevel(Setup setup, HostLayout layout, std::shared_ptr<Communicator> local, gloo::Mesh* parent = nullptr);

  /// Where the leaders come together, in the store.
  static std::string leaders_of(const std::string& name) { return name + "/leaders"; }

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
  void send(std::string_view object, int to, const CallOptions& options) override;
  std::string receive(int from, const CallOptions& options) override;
  std::shared_ptr<Communicator> group(std::span<const int> ranks, const CallOptions& options) override;

 private:
  /// What a leader tells the others of its host.
  struct Verdict {
    enum class Kind : std::uint32_t { go_on, differ, failed } kind;
    CollectiveError::Cause cause;
    std::uint32_t count;
    std::array<std::int32_t, 61> ranks;
  };

  bool leads() const noexcept { return layout_.local == 0; }
  std::size_t locals() const noexcept { return layout_.hosts[layout_.host].size(); }
  /// For each host: its members times `unit`.
  std::vector<std::size_t> per_host(std::size_t unit) const;

  void connect(gloo::Mesh* parent);
  void leave(const gloo::Failure& why) noexcept override;

  /// Returns when all members have made the same call; throws when they have not.
  void agree(const Call& call);
  std::vector<Signature> all_signatures(const Call& call, const std::vector<Signature>& own);
  /// In the middle of a call. step(local, options)
  template <class Step>
  auto locally(const Call& call, std::int64_t margin_ns, Step&& step);
  template <class Step>
  auto locally(const Call& call, Step&& step);
  /// Leaders: step(mesh), which returns whether the calls differ, or nothing. Then the verdict.
  template <class Step>
  bool between_hosts(const Call& call, Step&& step);
  void share(const Call& call, void* data, std::size_t bytes);
  static Verdict verdict_of(const gloo::Failure& failure);
  gloo::Failure whole_hosts(gloo::Failure failure) const;

  HostLayout layout_;
  std::vector<int> order_;          ///< Members, host by host.
  std::vector<std::size_t> bases_;  ///< Where a host begins there.
  std::shared_ptr<Communicator> local_;
  std::optional<gloo::Mesh> mesh_;  ///< Of a leader.
};

}  // namespace accelmgr::collective
