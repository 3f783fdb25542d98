// tools/cmake/Kernels.cmake compiles this file with the flags of the instruction set. Without them there is
// no such variant.
#if defined(__AVX512F__)
#include "engine/session/kernels_body.hpp"
#else
#include "engine/session/kernels_table.hpp"
#endif

namespace accelmgr::session {

#if defined(__AVX512F__)
const KernelTable* const avx512_kernels = &table;
#else
const KernelTable* const avx512_kernels = nullptr;
#endif

}  // namespace accelmgr::session
