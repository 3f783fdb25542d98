// Saves torch's random generators of this process as bytes in the session, and restores them.
#pragma once

#include <ATen/core/Generator.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace accelmgr::tensor {

/// These three act on the CPU's generator.
void seed_generator(std::uint64_t seed);
/// See engine/replica/generator_state.hpp.
void store_generator(std::span<std::byte> to);
void load_generator(std::span<const std::byte> from);

/// The default generators of a process that computes on `device`: that of the CPU, and behind it that of the
/// device. So a state has the same first bytes on every device, and a run can go on with another device.
std::vector<at::Generator> default_generators(at::Device device);

void seed_generators(std::span<const at::Generator> generators, std::uint64_t seed);
void store_generators(std::span<const at::Generator> generators, std::span<std::byte> to);
/// A device's generator stays as it is if its state was not stored. What was stored for further generators is
/// left out.
void load_generators(std::span<const at::Generator> generators, std::span<const std::byte> from);

}  // namespace accelmgr::tensor
