#include "base/ipc/main_heap.hpp"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <barrier>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/ipc/process.hpp"
#include "processes.hpp"

namespace accelmgr::ipc::test {
namespace {

// A sanitizer has a malloc of its own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
long page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

void use_large_block() {
  constexpr std::size_t bytes = 96 << 20;
  void* block = std::malloc(bytes);
  std::memset(block, 1, bytes);
  std::free(block);
}

TEST(OnMainHeap, ALargeBlockOfAForkKeepsItsPages) {
  constexpr int count = 10;
  std::barrier all(count);
  std::vector<std::jthread> threads(count);
  for (auto& thread : threads)
    thread = std::jthread([&] {
      std::free(std::malloc(100));  // The thread has a heap now.
      all.arrive_and_wait();
    });
  Child child;
  on_new_thread([&] {
    std::free(std::malloc(100));
    child = fork_self([] {
      mallopt(M_MMAP_THRESHOLD, 1 << 30);
      mallopt(M_TRIM_THRESHOLD, 2'000'000'000);
      on_main_heap([] {
        use_large_block();
        const long before = page_faults();
        use_large_block();
        _exit(page_faults() - before < 100 ? 0 : 1);  // It has 24,576 pages.
      });
    });
  });
  EXPECT_EQ(end_of(child), "exit code 0");
}
#endif

TEST(OnMainHeap, ThrowsWhatItsArgumentThrows) {
  EXPECT_THROW(on_main_heap([] { throw UsageError("here"); }), UsageError);
  EXPECT_THROW(on_new_thread([] { on_main_heap([] { throw UsageError("there"); }); }), UsageError);
}

}  // namespace
}  // namespace accelmgr::ipc::test
