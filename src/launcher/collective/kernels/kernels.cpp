#include "launcher/collective/kernels/kernels.hpp"

#include <cstring>

namespace accelmgr::collective {
namespace {

static_assert(static_cast<std::size_t>(DType::boolean) + 1 == kernel_dtypes);
static_assert(static_cast<std::size_t>(ReduceOp::bit_or) + 1 == kernel_ops);

const auto& variants() noexcept {
  static const base::simd::Variants<Kernels> all{portable_kernels, avx2_kernels, avx512_kernels};
  return all;
}

}  // namespace

const Kernels* kernels(Isa isa) noexcept { return variants().find(isa); }

const Kernels& best_kernels() noexcept { return variants().best(); }

void Kernels::copy(void* out, const void* in, std::size_t bytes, Stores stores) const noexcept {
  if (out == in || bytes == 0) return;
  if (stores == Stores::past_caches) return table_->copy_past_caches(out, in, bytes);
  std::memcpy(out, in, bytes);
}

}  // namespace accelmgr::collective
