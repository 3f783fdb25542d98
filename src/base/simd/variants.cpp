#include "base/simd/variants.hpp"

#include "base/enum_names.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace accelmgr::base::simd {
#if defined(__x86_64__)
namespace {

/// __builtin_cpu_supports() of clang 14 does not know "f16c".
bool has_f16c() noexcept {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace
#endif

const char* to_string(Isa isa) noexcept {
  static constexpr const char* names[]{"portable", "AVX2", "AVX-512"};
  return enum_name<Isa::avx512>(names, isa);
}

bool machine_has(Isa isa) noexcept {
  switch (isa) {
    case Isa::portable:
      return true;
#if defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && has_f16c();
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    case Isa::avx2:
    case Isa::avx512:
      return false;
#endif
  }
  return false;
}

}  // namespace accelmgr::base::simd
