// Checks that an object for which the receiver has no memory is not lost, and that no other object is
// received in its place.
#include <cstdint>
#include <cstdlib>
#include <new>

#include "contract.hpp"

namespace {

/// operator new refuses more bytes than this in this thread.
thread_local std::size_t most_bytes = SIZE_MAX;

}  // namespace

// Not inlined: g++ would take malloc() and delete for a pair that does not match.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  void* memory = bytes <= most_bytes ? std::malloc(bytes) : nullptr;
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace accelmgr::collective::contract {

CONTRACT(SendReceive, OfAnObjectWithoutMemoryForItCanBeTriedAgain, .fewest_ranks = 2) {
  const int last = self.world.size() - 1;
  const std::string object(1 << 20, 'x');
  if (self.world.rank() == 0) {
    self.world.send(object, last);
    self.world.send("next", last);
  } else if (self.world.rank() == last) {
    most_bytes = object.size() / 2;
    EXPECT_THROW(self.world.receive(0), std::bad_alloc);
    most_bytes = SIZE_MAX;
    EXPECT_TRUE(self.world.receive(0) == object);
    EXPECT_EQ(self.world.receive(0), "next");
  }
  self.world.barrier();
}

}  // namespace accelmgr::collective::contract
