// tools/cmake/Kernels.cmake compiles this file with the flags of the instruction set. Without them there is
// no such variant.
#include "launcher/collective/kernels/kernels_table.hpp"
#if defined(__AVX512F__)
#include "launcher/collective/kernels/kernels_body.hpp"
#endif

namespace accelmgr::collective {

#if defined(__AVX512F__)
const KernelTable* const avx512_kernels = &table<false>;
#else
const KernelTable* const avx512_kernels = nullptr;
#endif

}  // namespace accelmgr::collective
