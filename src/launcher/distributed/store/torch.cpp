#include "launcher/distributed/store/torch.hpp"

#include <fmt/format.h>

#include <atomic>
#include <exception>

#include "accelmgr/errors.hpp"

namespace accelmgr::distributed {
namespace {

constinit std::atomic<Torch*> registered{nullptr};

}  // namespace

void register_torch(Torch& torch) noexcept { registered = &torch; }

Torch* registered_torch() noexcept { return registered; }

std::optional<int> cuda_device(int local_rank) {
  auto* torch = registered_torch();
  const int count = torch == nullptr ? 0 : torch->cuda_device_count();
  return count == 0 ? std::nullopt : std::optional(local_rank % count);
}

void use_cuda_device(int local_rank) {
  const auto device = cuda_device(local_rank);
  if (!device) return;
  try {
    registered_torch()->use_cuda_device(*device);
  } catch (const std::exception& error) {
    throw SessionError(fmt::format("cuda:{}, the device of local rank {}, cannot be used: {}", *device,
                                   local_rank, error.what()));
  }
}

}  // namespace accelmgr::distributed
