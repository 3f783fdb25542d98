#include "launcher/collective/kernels/kernels_body.hpp"

namespace accelmgr::collective {

const KernelTable* const portable_kernels = &table<true>;

}  // namespace accelmgr::collective
