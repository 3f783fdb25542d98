#include "base/simd/variants.hpp"

#include "base/enum_names.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace accelmgr::base::simd {
#if defined(__x86_64__)
namespace {

// Not __builtin_cpu_supports(): clang 14 does not know "f16c" there, and in a module that ziglang has linked
// it knows nothing.

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf leaf(unsigned number) noexcept {
  Leaf it;
  __get_cpuid_count(number, 0, &it.eax, &it.ebx, &it.ecx, &it.edx);
  return it;
}

constexpr unsigned ymm_registers = 0x06, zmm_registers = 0xe6;

/// True if the system saves these registers when it switches threads.
bool saves(unsigned registers) noexcept {
  if ((leaf(1).ecx & bit_OSXSAVE) == 0) return false;
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & registers) == registers;
}

bool has(unsigned found, unsigned bits) noexcept { return (found & bits) == bits; }

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
      return saves(ymm_registers) && has(leaf(7).ebx, bit_AVX2) && has(leaf(1).ecx, bit_F16C);
    case Isa::avx512:
      return saves(zmm_registers) &&
             has(leaf(7).ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ);
#else
    case Isa::avx2:
    case Isa::avx512:
      return false;
#endif
  }
  return false;
}

}  // namespace accelmgr::base::simd
