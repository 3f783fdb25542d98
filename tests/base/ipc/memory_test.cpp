#include "base/ipc/memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include "accelmgr/errors.hpp"
#include "base/ipc/pages.hpp"
#include "processes.hpp"
#include "system_call.hpp"

namespace accelmgr::ipc::test {
namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t bytes = std::size_t{16} << 20;

/// The number of minor page faults in this process while `body` runs.
template <class Body>
long faults_of(Body&& body) {
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  body();
  getrusage(RUSAGE_SELF, &after);
  return after.ru_minflt - before.ru_minflt;
}

// Not sanitized: the page faults of a sanitizer's own memory would be counted.
__attribute__((no_sanitize("address", "thread", "undefined"))) void write_each_page(const Mapping& map) {
  auto* const byte = reinterpret_cast<volatile unsigned char*>(map.data());
  const std::size_t size = map.size();
  for (std::size_t at = 0; at < size; at += page) byte[at] = 1;
}

__attribute__((no_sanitize("address", "thread", "undefined"))) unsigned read_each_page(const Mapping& map) {
  const auto* const byte = reinterpret_cast<const volatile unsigned char*>(map.data());
  const std::size_t size = map.size();
  unsigned sum = 0;
  for (std::size_t at = 0; at < size; at += page) sum += byte[at];
  return sum;
}

TEST(Memfd, HasItsSizeAllocatedAndSealed) {
  const auto fd = create_memfd("test", bytes);
  struct stat status {};
  ASSERT_EQ(fstat(fd.get(), &status), 0);
  EXPECT_EQ(status.st_size, static_cast<off_t>(bytes));
  EXPECT_EQ(status.st_blocks * 512, static_cast<off_t>(bytes));
  EXPECT_EQ(fcntl(fd.get(), F_GETFD), FD_CLOEXEC);
  EXPECT_EQ(fcntl(fd.get(), F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  EXPECT_EQ(ftruncate(fd.get(), page), -1);
  EXPECT_EQ(ftruncate(fd.get(), 2 * bytes), -1);
  EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE), -1);
}

/// The error of a memfd that is made where the system call fails, in a child; "exit code 0" if it is right.
template <class Error, class IsRight>
std::string end_of_memfd(int error, IsRight is_right) {
  return end_of(fork_child([&] {
    fail_system_call(SYS_fallocate, error);
    alarm(20);
    try {
      create_memfd("slab", bytes);
    } catch (const Error& thrown) {
      return is_right(thrown) ? 0 : 1;
    }
    return 2;
  }));
}

TEST(Memfd, WithoutMemoryForItIsAnErrorThatSaysHowMuch) {
  const auto says_how_much = [](const SessionError& error) {
    const std::string what = error.what();
    return what.find("slab") != what.npos && what.find(std::to_string(bytes)) != what.npos;
  };
  EXPECT_EQ(end_of_memfd<SessionError>(ENOSPC, says_how_much), "exit code 0");
}

TEST(Memfd, WhoseMemoryIsAlwaysInterruptedIsAnError) {
  const auto is_interrupted = [](const SystemError& error) { return error.code() == EINTR; };
  EXPECT_EQ(end_of_memfd<SystemError>(EINTR, is_interrupted), "exit code 0");
}

TEST(Memfd, ThatIsOpenedForReadingAloneCannotBeWritten) {
  const auto memfd = create_memfd("test", page);
  const auto fd = open_read_only(memfd.get());
  EXPECT_EQ(sealed_bytes(fd.get(), "test"), page);
  EXPECT_EQ(mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0), MAP_FAILED);
  EXPECT_EQ(errno, EACCES);
  const Mapping map(fd.get(), 0, page, Access::read);
  EXPECT_EQ(mprotect(map.data(), page, PROT_READ | PROT_WRITE), -1);
  EXPECT_EQ(errno, EACCES);
  EXPECT_EQ(write(fd.get(), "x", 1), -1);
  EXPECT_EQ(errno, EBADF);
}

TEST(Memfd, CannotBeOpenedForWritingByOtherUsers) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const auto memfd = create_memfd("test", page);
  const auto fd = open_read_only(memfd.get());
  const auto child = fork_child([&fd] {
    constexpr uid_t nobody = 65534;
    if (setresuid(nobody, nobody, nobody) != 0) return 1;
    prctl(PR_SET_DUMPABLE, 1);  // So that its entries in /proc are its own.
    const auto path = fmt::format("/proc/self/fd/{}", fd.get());
    if (access("/proc/self/fd", R_OK | X_OK) != 0 || fchmod(fd.get(), 0666) == 0) return 2;
    return open(path.c_str(), O_RDWR) == -1 && errno == EACCES ? 0 : 3;
  });
  EXPECT_EQ(end_of(child), "exit code 0");
}

volatile sig_atomic_t interrupting_signals = 0;

TEST(Memfd, UnderAProfilersTimerGetsItsMemoryWithoutASignalMeanwhile) {
  const auto child = fork_child([] {
    signal(SIGALRM, [](int) { interrupting_signals = interrupting_signals + 1; });
    const itimerval often{.it_interval = {0, 100}, .it_value = {0, 100}};
    setitimer(ITIMER_REAL, &often, nullptr);
    while (interrupting_signals == 0) pause();
    const int before = interrupting_signals;
    create_memfd("slab", std::size_t{256} << 20);
    return interrupting_signals - before < 10 ? 0 : 1;
  });
  EXPECT_EQ(end_of(child), "exit code 0");
}

TEST(Memfd, OfNoBytesIsAnError) { EXPECT_THROW(create_memfd("test", 0), SystemError); }

TEST(Mapping, IsSharedWithForkedProcessesAndOtherMappings) {
  auto fd = create_memfd("test", 2 * page);
  const Mapping map(fd.get(), 0, 2 * page, Access::read_write);
  const Mapping second_page(fd.get(), page, page, Access::read);
  fd.reset();
  const auto child = fork_child([&] {
    map.data()[page] = std::byte{42};
    return 0;
  });
  EXPECT_EQ(end_of(child), "exit code 0");
  EXPECT_EQ(second_page.size(), page);
  EXPECT_EQ(second_page.data()[0], std::byte{42});
}

TEST(Mapping, IsWritableOnlyIfItIsMadeSo) {
  const auto fd = create_memfd("test", page);
  const auto end_of_writing = [&fd](Access access) {
    const Mapping map(fd.get(), 0, page, access);
    return end_of(fork_child([&map] {
      signal(SIGSEGV, SIG_DFL);  // A sanitizer's handler would report it and exit.
      map.data()[0] = std::byte{1};
      return 0;
    }));
  };
  EXPECT_EQ(end_of_writing(Access::read), "killed by signal 11 (SEGV)");
  EXPECT_EQ(end_of_writing(Access::read_write), "exit code 0");
}

TEST(Mapping, IsMovedAndUnmappedOnce) {
  const auto fd = create_memfd("test", page);
  Mapping map(fd.get(), 0, page, Access::read_write);
  std::byte* const address = map.data();
  Mapping moved(std::move(map));
  EXPECT_FALSE(map);  // NOLINT: what a moved-from mapping is, is the point.
  EXPECT_EQ(moved.data(), address);
  Mapping other(fd.get(), 0, page, Access::read_write);
  other = std::move(moved);
  EXPECT_EQ(other.data(), address);
  other.data()[0] = std::byte{1};
}

TEST(Mapping, ThatCannotBeMadeIsAnError) { EXPECT_THROW(Mapping(-1, 0, page, Access::read), SystemError); }

/// The number of page faults when each page of a new mapping is written.
long faults_unpopulated() {
  const auto fd = create_memfd("test", bytes);
  const Mapping map(fd.get(), 0, bytes, Access::read_write);
  return faults_of([&] { write_each_page(map); });
}

/// With huge pages for shared memory there are too few faults to see a difference.
bool has_small_pages() { return faults_unpopulated() >= static_cast<long>(bytes / page); }

class PopulateThreads : public testing::TestWithParam<int> {};

TEST_P(PopulateThreads, LeavesNoFaultForLaterAndKeepsContents) {
  if (!has_small_pages()) GTEST_SKIP() << "shared memory has huge pages";
  const auto fd = create_memfd("test", bytes);
  const Mapping written(fd.get(), 0, bytes, Access::read_write);
  write_each_page(written);
  const Mapping map(fd.get(), 0, bytes, Access::read_write);
  populate(map.data(), map.size(), GetParam());
  EXPECT_LT(faults_of([&] { write_each_page(map); }), 100);
  EXPECT_EQ(read_each_page(map), bytes / page);
}

INSTANTIATE_TEST_SUITE_P(Count, PopulateThreads, testing::Values(1, 2, 3, 64));

TEST(Populate, ByOneThreadStartsNone) {
  const auto child = fork_child([] {
    const auto fd = create_memfd("test", bytes);
    const Mapping map(fd.get(), 0, bytes, Access::read_write);
    die_of_system_call(SYS_clone3);
    populate(map.data(), map.size(), 1);
    return 0;
  });
  EXPECT_EQ(end_of(child), "exit code 0");
}

TEST(Populate, WhereNoThreadCanBeStartedIsDoneByTheCaller) {
  const auto child = fork_child([] {
    const auto fd = create_memfd("test", bytes);
    const Mapping map(fd.get(), 0, bytes, Access::read_write);
    fail_system_call(SYS_clone3, EAGAIN);
    populate(map.data(), map.size(), 4);
    return faults_of([&] { write_each_page(map); }) < 100 ? 0 : 1;
  });
  EXPECT_EQ(end_of(child), "exit code 0");
}

TEST(Populate, OnAnOldKernelTouchesThePages) {
  const auto child = fork_child([] {
    const auto fd = create_memfd("test", bytes);
    const Mapping map(fd.get(), 0, bytes, Access::read_write);
    const Mapping read_only(fd.get(), 0, bytes, Access::read);
    fail_system_call(SYS_madvise, EINVAL);
    populate(map.data(), map.size(), 1);
    if (faults_of([&] { write_each_page(map); }) >= 100) return 1;
    populate_read(read_only.data(), read_only.size());
    if (faults_of([&] { read_each_page(read_only); }) >= 100) return 2;
    return 0;
  });
  EXPECT_EQ(end_of(child), "exit code 0");
}

TEST(PopulateRead, LeavesNoFaultForLaterInAReadOnlyMapping) {
  const auto fd = create_memfd("test", bytes);
  const Mapping map(fd.get(), 0, bytes, Access::read);
  populate_read(map.data(), map.size());
  EXPECT_LT(faults_of([&] { EXPECT_EQ(read_each_page(map), 0U); }), 100);
}

TEST(Populate, OfWhatMayNotBeWrittenIsAnErrorAndNoFault) {
  const auto fd = create_memfd("test", bytes);
  const Mapping map(fd.get(), 0, bytes, Access::read);
  EXPECT_THROW(populate(map.data(), map.size(), 2), SystemError);
}

TEST(Populate, OutOfMemoryIsAnErrorThatSaysSo) {
  const auto child = fork_child([] {
    const auto fd = create_memfd("test", bytes);
    const Mapping map(fd.get(), 0, bytes, Access::read_write);
    fail_system_call(SYS_madvise, ENOMEM);
    try {
      populate(map.data(), map.size(), 1);
    } catch (const SessionError&) {
      return 0;
    }
    return 1;
  });
  EXPECT_EQ(end_of(child), "exit code 0");
}

TEST(Populate, OfAPartTouchesItsPagesOnly) {
  if (!has_small_pages()) GTEST_SKIP() << "shared memory has huge pages";
  const auto fd = create_memfd("test", bytes);
  const Mapping map(fd.get(), 0, bytes, Access::read_write);
  const auto pages_populated = [&] {
    const auto faults = faults_of([&] { write_each_page(map); });
    return static_cast<long>(bytes / page) - faults;
  };
  populate(map.data() + bytes / 2 + page / 2, bytes / 4, 1);
  populate(map.data(), 0, 4);
  EXPECT_NEAR(static_cast<double>(pages_populated()), bytes / page / 4., 100);
}

TEST(Mapping, ThatIsKeptFromChildrenIsNotInThem) {
  const auto fd = create_memfd("kept", 2 * largest_page_bytes);
  const Mapping kept(fd.get(), 0, largest_page_bytes, Access::read_write);
  const Mapping given(fd.get(), largest_page_bytes, largest_page_bytes, Access::read_write);
  kept.keep_from_children();
  kept.data()[0] = given.data()[0] = std::byte{7};
  const auto mapped = [](const Mapping& mapping) {
    unsigned char resident;
    return mincore(mapping.data(), mapping.size(), &resident) == 0;
  };
  ASSERT_TRUE(mapped(kept));
  const auto child = fork_child([&] { return (mapped(kept) ? 1 : 0) + (mapped(given) ? 2 : 0); });
  EXPECT_EQ(end_of(child), "exit code 2");
}

}  // namespace
}  // namespace accelmgr::ipc::test
