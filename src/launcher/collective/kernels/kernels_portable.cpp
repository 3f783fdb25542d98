#include "launcher/collective/kernels/kernels_body.hpp"

namespace accelmgr::collective {

namespace {

constexpr KernelTable table = make_all();

}  // namespace

const KernelTable* const portable_kernels = &table;

}  // namespace accelmgr::collective
