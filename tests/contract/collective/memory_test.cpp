// An object for which there is no memory: it is not lost, and nothing else is taken for it.
#include <cstdint>
#include <cstdlib>
#include <new>

#include "contract.hpp"

namespace {

/// In this thread there is no memory for more at once.
thread_local std::size_t most_bytes = SIZE_MAX;

}  // namespace

void* operator new(std::size_t bytes) {
  void* memory = bytes <= most_bytes ? std::malloc(bytes) : nullptr;
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

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
