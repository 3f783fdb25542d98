#include "tensor/generator.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <atomic>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "session/layout.hpp"

namespace accelmgr::tensor {
namespace {

// The state's length stands before it: it is torch's business and may be shorter than the room there is.
struct Stored {
  std::uint64_t bytes;
  std::byte state[session::generator_bytes - 8];
};
static_assert(sizeof(Stored) == session::generator_bytes);

}  // namespace

void seed_generator(std::uint64_t seed) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

void store_generator(std::byte* out) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto state = [&] {
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }();
  auto* stored = reinterpret_cast<Stored*>(out);
  if (state.nbytes() > sizeof stored->state)
    throw ModelError("the state of torch's generator is larger than its place in the session");
  std::memcpy(stored->state, state.const_data_ptr(), state.nbytes());
  // Last: who is killed before has stored nothing.
  std::atomic_ref(stored->bytes).store(state.nbytes(), std::memory_order_release);
}

void load_generator(const std::byte* in) {
  const auto* stored = reinterpret_cast<const Stored*>(in);
  if (stored->bytes == 0) return;
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto state =
      at::from_blob(const_cast<std::byte*>(stored->state), {static_cast<std::int64_t>(stored->bytes)},
                    at::TensorOptions().dtype(at::kByte))
          .clone();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace accelmgr::tensor
