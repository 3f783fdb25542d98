// Tests which CUDA device a rank uses, in a torch that was built with CUDA. The test registers two devices
// that do nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gmock/gmock.h>

#include <cstdlib>

#include "accelmgr/multiprocess.hpp"
#include "launcher/distributed/ranks.hpp"
#include "launcher/distributed/store/torch.hpp"
#include "message_of.hpp"

namespace accelmgr::distributed {
namespace {

using test::expect_on_ranks;
using testing::AllOf;
using testing::HasSubstr;

/// The state that a device library would keep.
class Devices final : public c10::impl::NoOpDeviceGuardImpl<at::kCUDA> {
 public:
  c10::DeviceIndex deviceCount() const noexcept override { return count; }
  c10::Device getDevice() const override { return {at::kCUDA, current}; }
  void setDevice(c10::Device device) const override {
    if (broken) throw std::runtime_error("no driver");
    current = device.index();
  }

  inline static c10::DeviceIndex count = 2, current = 0;
  inline static bool broken = false;
};
C10_REGISTER_GUARD_IMPL(CUDA, Devices)

class CudaDevice : public testing::Test {
 protected:
  ~CudaDevice() override {
    Devices::count = 2;
    Devices::current = 0;
    Devices::broken = false;
  }
};

TEST_F(CudaDevice, IsTheLocalRankModuloThoseThatThisProcessSees) {
  EXPECT_EQ(cuda_device(0), 0);
  EXPECT_EQ(cuda_device(3), 1);
  Devices::count = 1;
  EXPECT_EQ(cuda_device(3), 0);
  Devices::count = 0;
  EXPECT_EQ(cuda_device(3), std::nullopt);
}

TEST_F(CudaDevice, IsTheCurrentOneInAProcessGroup) {
  expect_on_ranks(3, [](int rank) {
    init_process_group_from_backend("shm");
    EXPECT_EQ(Devices::current, rank % 2);
    barrier();
  });
}

TEST_F(CudaDevice, IsTheCurrentOneInALaunchForGpus) {
  for (const bool for_gpus : {true, false})
    expect_on_ranks(2, [for_gpus](int rank) {
      if (for_gpus) ::setenv("ACCELMGR_SELECTED_GPUS", "7", 1);
      initialize("shm");
      EXPECT_EQ(Devices::current, for_gpus ? rank : 0);
      barrier();
    });
}

TEST_F(CudaDevice, ThatCannotBeUsedIsNamed) {
  Devices::broken = true;
  EXPECT_THAT(test::message_of<SessionError>([] { use_cuda_device(3); }),
              AllOf(HasSubstr("cuda:1"), HasSubstr("local rank 3"), HasSubstr("no driver")));
  Devices::count = 0;
  EXPECT_NO_THROW(use_cuda_device(3));
}

}  // namespace
}  // namespace accelmgr::distributed
