#include "collective/kernels.hpp"

#include <cstring>

namespace accelmgr::collective {
namespace {

static_assert(static_cast<std::size_t>(DType::boolean) + 1 == kernel_dtypes);
static_assert(static_cast<std::size_t>(ReduceOp::bit_or) + 1 == kernel_ops);

bool machine_has(Isa isa) noexcept {
  switch (isa) {
    case Isa::portable:
      return true;
#if defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
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

const KernelTable* table_of(Isa isa) noexcept {
  switch (isa) {
    case Isa::portable:
      return portable_kernels;
    case Isa::avx2:
      return avx2_kernels;
    case Isa::avx512:
      return avx512_kernels;
  }
  return nullptr;
}

}  // namespace

const char* to_string(Isa isa) noexcept {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "AVX2";
    case Isa::avx512:
      return "AVX-512";
  }
  return "?";
}

const Kernels* kernels(Isa isa) noexcept {
  if (table_of(isa) == nullptr || !machine_has(isa)) return nullptr;
  static const Kernels variants[] = {
      {Isa::portable, portable_kernels}, {Isa::avx2, avx2_kernels}, {Isa::avx512, avx512_kernels}};
  return &variants[static_cast<int>(isa)];
}

const Kernels& best_kernels() noexcept {
  static const Kernels& best = []() -> const Kernels& {
    for (Isa isa : {Isa::avx512, Isa::avx2}) {
      if (const Kernels* variant = kernels(isa)) return *variant;
    }
    return *kernels(Isa::portable);
  }();
  return best;
}

void Kernels::copy(void* out, const void* in, std::size_t bytes, Stores stores) const noexcept {
  if (out == in || bytes == 0) return;
  if (stores == Stores::past_caches) return table_->copy_past_caches(out, in, bytes);
  std::memcpy(out, in, bytes);
}

}  // namespace accelmgr::collective
