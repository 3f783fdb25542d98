// Collectives of tensors on devices. The ranks are threads; CUDA and NCCL are the fakes.
#include "launcher/distributed/arrays/device_group.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "accelmgr/errors.hpp"
#include "engine/support/fake_nccl.hpp"
#include "launcher/collective/expect_error.hpp"
#include "launcher/collective/worlds.hpp"
#include "launcher/distributed/ranks.hpp"
#include "message_of.hpp"

namespace accelmgr::distributed {
namespace {

using collective::test::run_threads;
using test::FakeCuda;
using test::FakeNccl;
using test::message_of;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class DeviceGroups : public testing::Test {
 protected:
  FakeCuda cuda{FakeCuda::Execution::threads};
  FakeNccl nccl;
};

DeviceGroup::Options options() {
  return {.libraries = {.runtime = FakeCuda::runtime, .nccl = FakeNccl::table},
          .cpu_memory_because = "",
          .timeout_s = collective::test::long_s};
}

const std::vector<std::int64_t> four{4}, six{6};

/// A rank with a GPU, and a tensor on it.
class Rank {
 public:
  explicit Rank(Communicator& members, const DeviceGroup::Options& options = distributed::options(),
                int number = -1)
      : members(members),
        device_(FakeCuda::runtime(), number < 0 ? members.rank() : number),
        stream_(device_.make_stream()),
        event_(device_.make_event()),
        group(members, options),
        place{number < 0 ? members.rank() : number, stream_.get()} {}

  /// A tensor of float32, or of what the values are, that lies on the device when the stream has come there.
  template <class T>
  T* tensor(const std::vector<T>& values) {
    auto& memory = memory_.emplace_back(device_.allocate(values.size() * sizeof(T) + 1));
    const auto bytes = std::as_bytes(std::span(values));
    device_.copy(memory.get(), bytes.data(), bytes.size(), device::Direction::to_device, stream_.get());
    return reinterpret_cast<T*>(memory.get());
  }
  template <class T>
  std::vector<T> values(const T* tensor, std::size_t count) {
    std::vector<T> found(count);
    device_.copy(reinterpret_cast<std::byte*>(found.data()), reinterpret_cast<const std::byte*>(tensor),
                 count * sizeof(T), device::Direction::to_host, stream_.get());
    device_.record(event_, stream_.get());
    while (!device_.happened(event_)) std::this_thread::yield();
    return found;
  }
  /// Reduces a tensor of four numbers.
  bool all_reduce() {
    return group.all_reduce({tensor<float>({1, 2, 3, 4}), DType::float32, four},
                            tensor(std::vector<float>(4)), ReduceOp::sum, place);
  }
  int number() const { return members.rank(); }

  Communicator& members;

 private:
  device::Device device_;
  device::Stream stream_;
  device::Event event_;
  std::vector<device::Memory> memory_;

 public:
  DeviceGroup group;
  const OnDevice place;
};

TEST_F(DeviceGroups, MakeAllCollectivesOverNccl) {
  run_threads(3, [](Communicator& members) {
    Rank rank(members);
    const auto own = static_cast<float>(rank.number());
    auto* in = rank.tensor<float>({own, own + 1, 2, own, 1, 0});
    auto* out = rank.tensor(std::vector<float>(18));
    const Array array{in, DType::float32, six};
    ASSERT_TRUE(rank.group.all_reduce(array, out, ReduceOp::sum, rank.place));
    EXPECT_THAT(rank.values(out, 6), ElementsAre(3, 6, 6, 3, 3, 0));
    ASSERT_TRUE(rank.group.all_reduce(array, out, ReduceOp::max, rank.place));
    EXPECT_THAT(rank.values(out, 3), ElementsAre(2, 3, 2));
    ASSERT_TRUE(rank.group.reduce_scatter(array, out, ReduceOp::sum, rank.place));
    EXPECT_EQ(rank.values(out, 2), (std::vector<std::vector<float>>{
                                       {3, 6}, {6, 3}, {3, 0}}[static_cast<std::size_t>(rank.number())]));
    ASSERT_TRUE(rank.group.all_gather(array, out, rank.place));
    EXPECT_THAT(rank.values(out, 18), ElementsAre(0, 1, 2, 0, 1, 0, 1, 2, 2, 1, 1, 0, 2, 3, 2, 2, 1, 0));
    ASSERT_TRUE(rank.group.all_to_all(array, out, rank.place));
    EXPECT_THAT(rank.values(out, 2), ElementsAre(rank.number() == 0   ? 0
                                                 : rank.number() == 1 ? 2
                                                                      : 1,
                                                 rank.number() == 0 ? 1 : 0));
    ASSERT_TRUE(rank.group.broadcast(array, in, 1, rank.place));
    EXPECT_THAT(rank.values(in, 6), ElementsAre(1, 2, 2, 1, 1, 0));
  });
  EXPECT_EQ(nccl.calls("ncclAllReduce"), 6);
  EXPECT_EQ(nccl.calls("ncclGetUniqueId"), 1);
  EXPECT_THAT(nccl.mismatches(), IsEmpty());
  EXPECT_THAT(nccl.misuses(), IsEmpty());
  EXPECT_EQ(nccl.live(), 0);
}

TEST_F(DeviceGroups, LoadNothingBeforeTheFirstCall) {
  run_threads(2, [](Communicator& members) {
    auto forbidden = options();
    forbidden.libraries.runtime = []() -> device::Runtime { throw std::logic_error("loaded"); };
    DeviceGroup group(members, forbidden);
    members.barrier();
  });
  EXPECT_EQ(nccl.calls("ncclGetUniqueId"), 0);
}

TEST_F(DeviceGroups, TakeHostMemoryWhereTwoRanksShareAGpu) {
  run_threads(3, [](Communicator& members) {
    Rank rank(members, options(), members.rank() / 2);
    const auto* in = rank.tensor<float>({1, 2, 3, 4});
    const Array array{in, DType::float32, four};
    EXPECT_FALSE(rank.group.all_reduce(array, nullptr, ReduceOp::sum, rank.place));
    EXPECT_FALSE(rank.group.all_gather(array, nullptr, rank.place));
  });
  EXPECT_EQ(nccl.calls("ncclGetUniqueId"), 0);
}

TEST_F(DeviceGroups, SayOnceWhyTheyTakeHostMemory) {
  testing::internal::CaptureStderr();
  run_threads(2, [](Communicator& members) {
    auto without = options();
    if (members.rank() == 1)
      without.libraries.nccl = []() -> device::Nccl { throw UsageError("there is no libnccl.so.2"); };
    Rank rank(members, without);
    for (int call = 0; call < 3; ++call) EXPECT_FALSE(rank.all_reduce());
  });
  const auto log = testing::internal::GetCapturedStderr();
  const auto said = log.find("through CPU memory: rank 1: there is no libnccl.so.2");
  EXPECT_NE(said, std::string::npos) << log;
  EXPECT_EQ(log.find("through CPU memory", said + 1), std::string::npos) << log;
}

TEST_F(DeviceGroups, TakeHostMemoryForWhatNcclDoesNotHave) {
  testing::internal::CaptureStderr();
  run_threads(2, [](Communicator& members) {
    Rank rank(members);
    const auto reduces = [&](DType dtype, ReduceOp op) {
      const Array array{rank.tensor<std::int64_t>({1, 2, 3, 4}), dtype, four};
      return rank.group.all_reduce(array, rank.tensor<std::int64_t>({0, 0, 0, 0}), op, rank.place);
    };
    EXPECT_FALSE(reduces(DType::int32, ReduceOp::bit_and));
    EXPECT_FALSE(reduces(DType::int32, ReduceOp::bit_and));
    EXPECT_FALSE(reduces(DType::int64, ReduceOp::bit_or));
    EXPECT_FALSE(reduces(DType::boolean, ReduceOp::sum));
    EXPECT_FALSE(reduces(DType::int16, ReduceOp::max));
    EXPECT_FALSE(reduces(DType::complex64, ReduceOp::sum));
    EXPECT_TRUE(reduces(DType::int32, ReduceOp::sum));
    const Array array{rank.tensor<std::int16_t>({1, 2, 3, 4}), DType::int16, four};
    auto* out = rank.tensor(std::vector<std::int16_t>(8));
    ASSERT_TRUE(rank.group.all_gather(array, out, rank.place));  // What is only moved has any dtype.
    EXPECT_THAT(rank.values(out, 8), ElementsAre(1, 2, 3, 4, 1, 2, 3, 4));
  });
  const auto log = testing::internal::GetCapturedStderr();
  const auto said = log.find("AND of int32");
  EXPECT_NE(said, std::string::npos) << log;
  EXPECT_EQ(log.find("AND of int32", said + 1), std::string::npos) << log;
}

TEST_F(DeviceGroups, NameDifferentCallsAndGoOn) {
  run_threads(2, [](Communicator& members) {
    Rank rank(members);
    auto* in = rank.tensor<float>({1, 2, 3, 4, 5, 6});
    auto* out = rank.tensor(std::vector<float>(6));
    EXPECT_THAT(message_of<CollectiveError>([&] {
                  static_cast<void>(rank.group.all_reduce(
                      {in, DType::float32, rank.number() == 0 ? four : six}, out, ReduceOp::sum, rank.place));
                }),
                AllOf(HasSubstr("rank 0 called all_reduce SUM float32 [4] on a device"),
                      HasSubstr("rank 1 called all_reduce SUM float32 [6] on a device")));
    const auto ranks = test::mismatched([&] {
      const Array array{in, DType::float32, four};
      if (rank.number() == 0) return static_cast<void>(rank.group.all_gather(array, out, rank.place));
      float host[4]{}, gathered[8];
      members.all_gather(host, gathered, 4, DType::float32, {.shape = four});
    });
    EXPECT_THAT(ranks, ElementsAre(1));
    ASSERT_TRUE(rank.group.all_reduce({in, DType::float32, four}, out, ReduceOp::sum, rank.place));
    EXPECT_THAT(rank.values(out, 4), ElementsAre(2, 4, 6, 8));
  });
  EXPECT_THAT(nccl.mismatches(), IsEmpty());
}

TEST_F(DeviceGroups, NameTheRankThatIsLostInTheMiddle) {
  run_threads(3, [](Communicator& members) {
    Rank rank(members);
    ASSERT_TRUE(rank.all_reduce());
    if (rank.number() == 1)  // It agrees, and does no more.
      return members.all_reduce(nullptr, nullptr, 0, DType::float32, ReduceOp::sum,
                                {.shape = four, .on_devices = true});
    EXPECT_THAT(test::expect_error(CollectiveError::Cause::lost, {1}, [&] { rank.all_reduce(); }),
                HasSubstr("all_reduce"));
  });
  EXPECT_THAT(nccl.misuses(), IsEmpty());
}

TEST_F(DeviceGroups, TellTheErrorOfADeviceAndBreak) {
  nccl.fail("ncclAllReduce", 1, device::nccl_code::system_error);
  std::atomic<int> failed = 0;
  run_threads(2, [&](Communicator& members) {
    auto impatient = options();
    impatient.timeout_s = 5;
    Rank rank(members, impatient);
    try {
      rank.all_reduce();
      ADD_FAILURE() << "it did not throw";
    } catch (const device::DeviceError& error) {
      ++failed;
      EXPECT_EQ(error.function(), "ncclAllReduce");
    } catch (const CollectiveError& error) {
      EXPECT_EQ(error.cause(), CollectiveError::Cause::timeout);
      EXPECT_THAT(error.what(), HasSubstr("all_reduce on 2 devices"));
    }
    EXPECT_THAT(message_of<CollectiveError>([&] { rank.all_reduce(); }), HasSubstr("make a new group"));
  });
  EXPECT_EQ(failed, 1);
}

TEST_F(DeviceGroups, TakeHostMemoryIfNcclDoesNotConnect) {
  nccl.fail("ncclCommInitRankConfig", 2, device::nccl_code::system_error);
  run_threads(2, [](Communicator& members) {
    auto impatient = options();
    impatient.timeout_s = 5;
    Rank rank(members, impatient);
    EXPECT_FALSE(rank.all_reduce());
  });
  EXPECT_THAT(nccl.misuses(), IsEmpty());
  EXPECT_EQ(nccl.live(), 0);
}

TEST_F(DeviceGroups, ExplainWhichShapesAndDevicesWillDo) {
  run_threads(2, [](Communicator& members) {
    Rank rank(members);
    const std::vector<std::int64_t> three{3};
    const Array array{rank.tensor<float>({1, 2, 3}), DType::float32, three};
    EXPECT_THROW(static_cast<void>(rank.group.reduce_scatter(array, nullptr, ReduceOp::sum, rank.place)),
                 UsageError);
    EXPECT_THROW(static_cast<void>(rank.group.all_reduce(array, nullptr, ReduceOp::bit_or, rank.place)),
                 UsageError);
    auto* out = rank.tensor(std::vector<float>(3));
    ASSERT_TRUE(rank.group.all_reduce(array, out, ReduceOp::sum, rank.place));
    EXPECT_THAT(message_of<UsageError>([&] {
                  static_cast<void>(rank.group.all_reduce(array, out, ReduceOp::sum, {7, rank.place.stream}));
                }),
                AllOf(HasSubstr("device 7"), HasSubstr(fmt::format("device {}", rank.number()))));
    const std::vector<std::int64_t> none{0, 3};
    ASSERT_TRUE(rank.group.all_reduce({nullptr, DType::float32, none}, nullptr, ReduceOp::sum, rank.place));
  });
}

}  // namespace
}  // namespace accelmgr::distributed
