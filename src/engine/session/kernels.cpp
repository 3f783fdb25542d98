#include "engine/session/kernels.hpp"

#include <cstring>

namespace accelmgr::session {
namespace {

static_assert(static_cast<int>(Element::f32) == 0 && static_cast<int>(Element::f64) == 1);
static_assert(static_cast<int>(Element::bf16) == 2 && static_cast<int>(Element::f16) == 3);

const auto& variants() noexcept {
  static const base::simd::Variants<Kernels> all{portable_kernels, avx2_kernels, avx512_kernels};
  return all;
}

}  // namespace

const Kernels* kernels(Isa isa) noexcept { return variants().find(isa); }

const Kernels& best_kernels() noexcept { return variants().best(); }

void Kernels::zero(void* begin, std::size_t bytes) const noexcept {
  if (bytes < non_temporal_from_bytes) {
    std::memset(begin, 0, bytes);
  } else {
    table_->zero_non_temporal(begin, bytes);
  }
}

}  // namespace accelmgr::session
