// The state of random number generators in the session: a 64-bit length, then the bytes.
#pragma once

#include <cstddef>
#include <span>

namespace accelmgr::replica {

/// Throws ModelError if `state` does not fit.
void store_generator(std::span<const std::byte> state, std::span<std::byte> to);
/// A view of the stored state; empty if nothing was stored yet. Throws ModelError if the length is
/// impossible.
std::span<const std::byte> stored_generator(std::span<const std::byte> from);

}  // namespace accelmgr::replica
