#include "engine/replica/generator_state.hpp"

#include <fmt/format.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "accelmgr/errors.hpp"

namespace accelmgr::replica {
namespace {

using Length = std::uint64_t;

}  // namespace

void store_generator(std::span<const std::byte> state, std::span<std::byte> to) {
  if (state.size() > to.size() - sizeof(Length))
    throw ModelError(fmt::format("the state of the model's generators has {} bytes; a session holds {}",
                                 state.size(), to.size() - sizeof(Length)));
  std::memcpy(to.data() + sizeof(Length), state.data(), state.size());
  // The length is stored last: in a new session, a process that is killed before has stored nothing.
  std::atomic_ref(*reinterpret_cast<Length*>(to.data())).store(state.size(), std::memory_order_release);
}

std::span<const std::byte> stored_generator(std::span<const std::byte> from) {
  Length length = 0;
  std::memcpy(&length, from.data(), sizeof length);
  if (length > from.size() - sizeof(Length))
    throw ModelError(fmt::format(
        "the state of the model's generators in the session claims {} bytes, more than it can have", length));
  return from.subspan(sizeof(Length), length);
}

}  // namespace accelmgr::replica
