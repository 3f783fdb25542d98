// Tests of how runners with a GPU each start: they open their devices at the same time, and build their
// replicas one after the other. Driver and CUDA are fakes; the processes are real.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <stdlib.h>

#include <algorithm>
#include <fstream>
#include <stdexcept>

#include "engine/support/expectations.hpp"
#include "engine/support/fake_device_replica.hpp"
#include "perceptrons.hpp"
#include "support.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {
namespace {

using testing::ElementsAre;
using testing::IsSupersetOf;

constexpr const char* noted_starts = "noted_starts";
constexpr int ranks = 3;

/// What runners have done, as lines of a file in the order in which they did it.
class Notes {
 public:
  explicit Notes(const Config& config) : path_(config.model.options.at("notes")) {}
  void add(const char* what, int rank) const {
    std::ofstream(path_, std::ios::app) << fmt::format("{} {}\n", what, rank);
  }
  std::vector<std::string> all() const {
    std::vector<std::string> lines;
    std::ifstream file(path_);
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }
  void await(const char* what, int rank) const {
    const auto line = fmt::format("{} {}", what, rank);
    for (const auto deadline = soon(); std::ranges::count(all(), line) == 0; sched_yield())
      if (deadline.passed()) throw std::runtime_error(fmt::format("rank {} never {}", rank, what));
  }

 private:
  std::string path_;
};

/// Others open while rank 0 does, which is done last.
void open(const Config& config, replica::Role role) {
  const Notes notes(config);
  notes.add("opens", role.rank);
  if (role.rank != 0) notes.await("opens", 0);
  for (int rank = 1; role.rank == 0 && rank < ranks; ++rank) notes.await("has opened", rank);
  notes.add("has opened", role.rank);
}

/// A rank is ready only when the next one builds.
device::Nccl no_nccl(const Config& config, int rank) {
  if (rank + 1 < ranks) Notes(config).await("builds", rank + 1);
  throw UsageError("there is no NCCL");
}

const RegisteredReplica noted(
    noted_starts,
    [](const Config& config, replica::Role role) {
      const Notes notes(config);
      if (role.computes()) notes.add("builds", role.rank);
      auto replica = std::make_unique<FakeDeviceReplica>(make_perceptron({.inputs = 4, .hidden = 6}));
      replica->use_nccl([&config, role] { return no_nccl(config, role.rank); });
      if (role.computes()) notes.add("has built", role.rank);
      return replica;
    },
    open);

TEST(DeviceStart, OpensAllDevicesAtOnceAndBuildsOneReplicaAfterTheOtherWhileThoseBeforeGoOn) {
  unsetenv("CUDA_VISIBLE_DEVICES");
  setenv("FAKE_DRIVER_GPUS", std::to_string(ranks).c_str(), 1);
  const TemporaryFolder folder;
  auto config = perceptron_config({.inputs = 4, .hidden = 6}, noted_starts);
  config.model.options["notes"] = folder / "notes";
  config.nprocs = ranks;
  config.runners.device = accelmgr::Device::cuda;
  config.runners.nccl = NcclUse::automatic;
  client::Handle manager(config, {});
  expect_ok(manager);
  const auto notes = Notes(config).all();
  ASSERT_EQ(notes.size(), 4u * ranks);
  const auto built = notes.begin() + 2 * ranks;
  EXPECT_THAT(std::vector(notes.begin(), built),
              IsSupersetOf({"has opened 0", "has opened 1", "has opened 2"}));
  EXPECT_THAT(std::vector(built, notes.end()),
              ElementsAre("builds 0", "has built 0", "builds 1", "has built 1", "builds 2", "has built 2"));
}

}  // namespace
}  // namespace accelmgr::test
