// tools/cmake/Kernels.cmake compiles this file with the flags of the instruction set. Without them there is
// no such variant.
#include "launcher/collective/kernels/kernels_table.hpp"
#if defined(__AVX2__)
#include "launcher/collective/kernels/kernels_body.hpp"
#endif

namespace accelmgr::collective {

#if defined(__AVX2__)
const KernelTable* const avx2_kernels = &table<false>;
#else
const KernelTable* const avx2_kernels = nullptr;
#endif

}  // namespace accelmgr::collective
