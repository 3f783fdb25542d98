// The collectives of the shm backend. They cut buffers into rounds of a group.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "launcher/collective/kernels/kernels.hpp"
#include "launcher/collective/shm/group.hpp"

namespace accelmgr::collective::shm {

class ShmCommunicator final : public Communicator {
 public:
  explicit ShmCommunicator(std::unique_ptr<Group> group);

  std::string_view backend() const noexcept override { return "shm"; }
  int rank() const noexcept override { return group_->me(); }
  int size() const noexcept override { return group_->size(); }
  const std::vector<int>& ranks() const noexcept override { return group_->world_ranks(); }
  std::vector<int> gone() override { return group_->gone(); }

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

  void give_up() noexcept { group_->give_up(); }

 private:
  class Call;
  struct Reduction {
    const std::byte* in;
    std::byte* out;
    std::size_t count;
    DType dtype;
    ReduceOp op;
  };

  /// Returns body(call) for a call with this signature. Any exception other than CollectiveError ends the
  /// group.
  template <class Body>
  auto run(CallKind kind, std::size_t count, DType dtype, ReduceOp op, int root, const CallOptions& options,
           Body body);
  double timeout_s(const CallOptions& options) const noexcept;

  void reduce_whole(Call& call, const Reduction& reduction);
  void reduce_slices(Call& call, const Reduction& reduction);
  /// out = the reduction of `count` elements: those at `offset` in the halves of the other members, and those
  /// at `mine` of this member.
  void reduce_halves(std::size_t offset, const void* mine, void* out, std::size_t count,
                     const Reduction& reduction, Stores stores);

  std::unique_ptr<Group> group_;
  std::uint64_t calls_ = 0;
  std::map<std::vector<int>, std::uint64_t> groups_made_;
  std::vector<const void*> inputs_;
};

}  // namespace accelmgr::collective::shm
