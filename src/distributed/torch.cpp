#include "distributed/torch.hpp"

#include <atomic>

namespace accelmgr::distributed {
namespace {

constinit std::atomic<Torch*> registered{nullptr};

}  // namespace

void register_torch(Torch& torch) noexcept { registered = &torch; }

Torch* registered_torch() noexcept { return registered; }

}  // namespace accelmgr::distributed
