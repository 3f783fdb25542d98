// tools/cmake/Kernels.cmake compiles this file with the flags of the instruction set. Without them there is
// no such variant.
#include "engine/session/kernels_table.hpp"
#if defined(__AVX2__)
#include "engine/session/kernels_body.hpp"
#endif

namespace accelmgr::session {

#if defined(__AVX2__)
const KernelTable* const avx2_kernels = &table;
#else
const KernelTable* const avx2_kernels = nullptr;
#endif

}  // namespace accelmgr::session
