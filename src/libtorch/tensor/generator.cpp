#include "libtorch/tensor/generator.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "engine/replica/generator_state.hpp"

namespace accelmgr::tensor {
namespace {

/// Row-major bytes on the CPU.
at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

std::vector<at::Generator> of_the_cpu() { return {at::detail::getDefaultCPUGenerator()}; }

}  // namespace

std::vector<at::Generator> default_generators(at::Device device) {
  auto generators = of_the_cpu();
  if (!device.is_cpu()) generators.push_back(at::globalContext().defaultGenerator(device));
  return generators;
}

void seed_generators(std::span<const at::Generator> generators, std::uint64_t seed) {
  for (auto generator : generators) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

void store_generators(std::span<const at::Generator> generators, std::span<std::byte> to) {
  std::vector<std::byte> bytes;
  for (const auto& generator : generators) {
    const auto state = state_of(generator);
    const auto* begin = static_cast<const std::byte*>(state.const_data_ptr());
    bytes.insert(bytes.end(), begin, begin + state.nbytes());
  }
  replica::store_generator(bytes, to);
}

void load_generators(std::span<const at::Generator> generators, std::span<const std::byte> from) {
  auto stored = replica::stored_generator(from);
  const auto all = stored.size();
  for (auto generator : generators) {
    auto bytes = state_of(generator).nbytes();
    if (stored.empty() || (stored.size() < bytes && stored.size() < all)) return;
    bytes = std::min(bytes, stored.size());  // set_state() refuses a state of the CPU that is too short.
    const auto state = at::from_blob(const_cast<std::byte*>(stored.data()),
                                     {static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte))
                           .clone();
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state);
    stored = stored.subspan(bytes);
  }
}

void seed_generator(std::uint64_t seed) { seed_generators(of_the_cpu(), seed); }
void store_generator(std::span<std::byte> to) { store_generators(of_the_cpu(), to); }
void load_generator(std::span<const std::byte> from) { load_generators(of_the_cpu(), from); }

}  // namespace accelmgr::tensor
