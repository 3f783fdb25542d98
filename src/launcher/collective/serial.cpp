#include "launcher/collective/serial.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>

#include "launcher/collective/signature/argument_checks.hpp"

namespace accelmgr::collective {
namespace {

void copy(const void* in, void* out, std::size_t bytes) noexcept {
  if (in != out && bytes != 0) std::memcpy(out, in, bytes);
}

class Serial final : public Communicator {
 public:
  explicit Serial(int world_rank) : ranks_{world_rank} {}

  std::string_view backend() const noexcept override { return "serial"; }
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  const std::vector<int>& ranks() const noexcept override { return ranks_; }
  std::vector<int> gone() override { return {}; }

  void all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                  const CallOptions&) override {
    check_reduction(dtype, op);
    copy(in, out, count * size_of(dtype));
  }
  void reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                      const CallOptions& options) override {
    all_reduce(in, out, count, dtype, op, options);
  }
  void all_gather(const void* in, void* out, std::size_t count, DType dtype, const CallOptions&) override {
    copy(in, out, count * size_of(dtype));
  }
  void broadcast(void*, std::size_t, DType, int root, const CallOptions&) override {
    check_member(root, 1, "root");
  }
  void all_to_all(const void* in, void* out, std::size_t count, DType dtype, const CallOptions&) override {
    copy(in, out, count * size_of(dtype));
  }
  void barrier(const CallOptions&) override {}

  std::vector<std::string> all_gather_objects(std::string_view object, const CallOptions&) override {
    return {std::string(object)};
  }
  std::string broadcast_object(std::string_view object, int root, const CallOptions&) override {
    check_member(root, 1, "root");
    return std::string(object);
  }
  std::shared_ptr<Communicator> group(std::span<const int> ranks, const CallOptions&) override {
    if (ranks.size() != 1 || ranks[0] != 0)
      throw UsageError(
          fmt::format("the ranks of a group are [{}]; they must be [0]: this communicator has one rank",
                      fmt::join(ranks, ", ")));
    return make_serial(ranks_[0]);
  }

 private:
  std::vector<int> ranks_;
};

}  // namespace

std::shared_ptr<Communicator> make_serial(int world_rank) { return std::make_shared<Serial>(world_rank); }

}  // namespace accelmgr::collective
