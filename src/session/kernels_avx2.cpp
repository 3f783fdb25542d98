// Compiled with the flags of src/cmake/Kernels.cmake; without them there is no such variant.
#if defined(__AVX2__)
#include "session/kernels_body.hpp"
#else
#include "session/kernels_table.hpp"
#endif

namespace accelmgr::session {

#if defined(__AVX2__)
const KernelTable* const avx2_kernels = &table;
#else
const KernelTable* const avx2_kernels = nullptr;
#endif

}  // namespace accelmgr::session
