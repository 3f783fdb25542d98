// tools/cmake/Kernels.cmake compiles this file with the flags of the instruction set. Without them there is
// no such variant.
#if defined(__AVX2__)
#include "engine/session/kernels_body.hpp"
#else
#include "engine/session/kernels_table.hpp"
#endif

namespace accelmgr::session {

#if defined(__AVX2__)
const KernelTable* const avx2_kernels = &table;
#else
const KernelTable* const avx2_kernels = nullptr;
#endif

}  // namespace accelmgr::session
