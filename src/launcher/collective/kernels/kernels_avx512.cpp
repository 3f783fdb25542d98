// Compiled with the flags of tools/cmake/Kernels.cmake; without them this variant does not exist.
#if defined(__AVX512F__)
#include "launcher/collective/kernels/kernels_body.hpp"
#else
#include "launcher/collective/kernels/kernels_table.hpp"
#endif

namespace accelmgr::collective {

#if defined(__AVX512F__)
namespace {

constexpr KernelTable table = make_common();

}  // namespace

const KernelTable* const avx512_kernels = &table;
#else
const KernelTable* const avx512_kernels = nullptr;
#endif

}  // namespace accelmgr::collective
