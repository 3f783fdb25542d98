#include "distributed/cuda_device.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>

#include <exception>

#include "accelmgr/errors.hpp"

namespace accelmgr::distributed {

std::optional<at::Device> cuda_device(int local_rank) {
  if (!c10::impl::hasDeviceGuardImpl(at::kCUDA)) return std::nullopt;
  const int count = c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount();
  if (count == 0) return std::nullopt;
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(local_rank % count));
}

void use_cuda_device(int local_rank) {
  const auto device = cuda_device(local_rank);
  if (!device) return;
  try {
    c10::impl::getDeviceGuardImpl(at::kCUDA)->setDevice(*device);
  } catch (const std::exception& error) {
    throw SessionError(fmt::format("{}, the device of local rank {}, cannot be used: {}", device->str(),
                                   local_rank, error.what()));
  }
}

}  // namespace accelmgr::distributed
