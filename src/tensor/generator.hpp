// torch's random generator of this process, as bytes in the session.
#pragma once

#include <cstddef>
#include <cstdint>

namespace accelmgr::tensor {

void seed_generator(std::uint64_t seed);
/// `out`: session::generator_bytes long.
void store_generator(std::byte* out);
void load_generator(const std::byte* in);

}  // namespace accelmgr::tensor
