// torch exports the symbols of another version of gloo. Checks that the plug-in's gloo keeps its own symbols
// in a process with torch.
#include <ATen/ops/full.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <fstream>
#include <thread>
#include <vector>

#include "launcher/collective/gloo/load.hpp"
#include "launcher/collective/hosts/hosts.hpp"
#include "launcher/collective/hosts/store.hpp"

namespace gloo::transport {
class Device;
}

namespace c10d {
/// torch ships no header of gloo. The tests need only this part of torch's.
class ProcessGroupGloo {
 public:
  static std::shared_ptr<::gloo::transport::Device> createDefaultDevice(bool lazy);
};
}  // namespace c10d

namespace accelmgr::distributed {
namespace {

/// A store of torch, shared by threads.
class TorchStore final : public collective::Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::HashStore> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key, base::Deadline deadline) override {
    const auto patience =
        std::chrono::milliseconds(std::max<std::int64_t>(deadline.remaining_ns() / 1'000'000, 1));
    try {
      store_->wait({key}, patience);
    } catch (const c10::DistStoreError& error) {
      throw CollectiveError(error.what(), CollectiveError::Cause::timeout, {});
    }
    const auto value = store_->get(key);
    return {value.begin(), value.end()};
  }
  bool has(const std::string& key) override { return store_->check({key}); }
  std::int64_t add(const std::string& key, std::int64_t amount) override { return store_->add(key, amount); }

 private:
  c10::intrusive_ptr<c10d::HashStore> store_;
};

bool is_mapped(const std::string& library) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find(library) != std::string::npos) return true;
  return false;
}

void reduce_on(const std::shared_ptr<Communicator>& world) {
  const auto tensor = at::full({100'000}, world->rank() + 1, at::kFloat);
  world->all_reduce(tensor.data_ptr(), tensor.data_ptr(), 100'000, DType::float32, ReduceOp::sum);
  EXPECT_TRUE(tensor.eq(3).all().item<bool>());
}

/// Makes torch's gloo open and close sockets and run a thread.
void use_torchs_gloo() { EXPECT_NE(c10d::ProcessGroupGloo::createDefaultDevice(false), nullptr); }

TEST(GlooBesideTorch, EachKeepsItsOwnSymbols) {
  if (const auto why_not = collective::gloo::unavailable_because(); !why_not.empty()) GTEST_SKIP() << why_not;
  ASSERT_TRUE(is_mapped("libtorch_cpu.so"));
  ASSERT_TRUE(is_mapped("libgloo.so"));
  // A look-up of a gloo symbol in this process finds torch's. The plug-in's must not be visible.
  void* seen = dlsym(RTLD_DEFAULT, "_ZN4gloo7ContextC1Eiii");
  Dl_info info{};
  ASSERT_NE(seen, nullptr);
  ASSERT_NE(dladdr(seen, &info), 0);
  EXPECT_NE(std::string(info.dli_fname).find("libtorch_cpu.so"), std::string::npos) << info.dli_fname;

  use_torchs_gloo();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto run_rank = [&](int rank) {
    TorchStore own(store);
    const auto world = collective::rendezvous(own, "world",
                                              {.rank = rank,
                                               .size = 2,
                                               .timeout_s = 30,
                                               .interface = "lo",
                                               .host = "host of rank " + std::to_string(rank)});
    EXPECT_EQ(world->backend(), "gloo");
    reduce_on(world);
    if (rank == 0) use_torchs_gloo();
    reduce_on(world);
  };
  const std::jthread other(run_rank, 1);
  run_rank(0);
}

}  // namespace
}  // namespace accelmgr::distributed
