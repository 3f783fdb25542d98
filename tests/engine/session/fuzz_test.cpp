// Fuzz tests of Session::attach(). They damage the descriptors, as another program or a bug may;
// tests/fuzz/session_header.cpp damages the header, tests/fuzz/manifest.cpp the manifest. A process that has
// attached such a session must be able to use all of it without leaving its memory.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "accelmgr/errors.hpp"
#include "engine/session/batch_queue.hpp"
#include "engine/session/session.hpp"
#include "fuzzed.hpp"
#include "session_support.hpp"
#include "used_session.hpp"

namespace accelmgr::session {
namespace {

using test::Fuzzed;

constexpr int rounds = 2000;

class SessionFuzz : public testing::Test {
 protected:
  /// Whether the session could be attached and used. An exception other than SessionError fails the test.
  bool is_used(std::vector<base::UniqueFd> fds) {
    try {
      auto session = Session::attach(std::move(fds));
      use(session);
      return true;
    } catch (const SessionError&) {
      return false;
    }
  }

  Fuzzed fuzzed{20261122};
  Manifest manifest = some_manifest();
  Session made = session_of(manifest, 2);
};

TEST_F(SessionFuzz, OtherDescriptorsAreRefused) {
  const auto other_size = [&](std::size_t bytes) { return ipc::create_memfd("other", bytes); };
  for (int round = 0; round < rounds / 4; ++round) {
    auto fds = descriptors_of(made);
    const auto at = static_cast<std::ptrdiff_t>(fuzzed.below(fds.size()));
    auto& fd = fds[static_cast<std::size_t>(at)];
    switch (fuzzed.below(6)) {
      case 0:
        fds.erase(fds.begin() + at);
        break;
      case 1:
        fds.push_back(base::duplicate(fds[1].get()));
        break;
      case 2:
        fd = other_size(1 + fuzzed.below(made.header().total_bytes));
        break;
      case 3: {
        auto strange = test::some_descriptors(fuzzed, 1);
        fd = strange.empty() ? base::UniqueFd() : std::move(strange[0]);
        break;
      }
      case 4:
        std::swap(fds[0], fds[1]);
        break;
      default:  // Not sealed: another process could still shrink it.
        fd.reset(memfd_create("not sealed", MFD_CLOEXEC));
        ASSERT_EQ(ftruncate(fd.get(), static_cast<off_t>(made.header().slab_bytes)), 0);
    }
    EXPECT_FALSE(is_used(std::move(fds)));
  }
}

TEST_F(SessionFuzz, AHeaderThatChangesLaterChangesNothing) {
  auto attached = Session::attach(descriptors_of(made));
  const auto before = attached.header().parameters;
  std::fill_n(memory_of(made), sizeof(Header), std::byte{0xff});
  EXPECT_EQ(attached.header().parameters, before);
  use(attached);
}

TEST_F(SessionFuzz, AQueueGivesNoMoreElementsThanABatchHas) {
  BatchQueueWriter queue(made, 1);
  const auto batch_size = made.header().batch_size;
  for (int round = 0; round < rounds; ++round) {
    const auto elements = fuzzed.one_in(2) ? fuzzed.edge() : fuzzed.below(2 * batch_size);
    const auto number = fuzzed.edge();
    made.queue(1).published.store(fuzzed.edge());
    auto* counts = reinterpret_cast<std::uint64_t*>(&made.queue(1) + 1);
    counts[0] = counts[1] = elements;  // The counts of all batches: there are two slots.
    made.queue(1).filling.store(elements);
    std::fill_n(made.queue(1).error, text_bytes, 'x');
    EXPECT_LE(queue.filling(), batch_size);
    EXPECT_EQ(queue.error(), std::string(text_bytes, 'x'));
    BatchQueue::Filled filled{};
    const bool is_right = elements >= 1 && elements <= batch_size;
    try {
      const auto state = queue.look(number, filled);
      if (state != BatchQueue::State::filled) continue;
      EXPECT_TRUE(is_right) << elements;
      touch(const_cast<std::byte*>(filled.slot), made.header().slot_bytes);
    } catch (const SessionError&) {
      EXPECT_FALSE(is_right) << elements;
    }
  }
}

TEST_F(SessionFuzz, ASourceStateThatIsNoneIsRefused) {
  auto& sharding = made.sharding();
  sharding.source[1].bytes = source_state_bytes;
  sharding.source_index.store(1);
  EXPECT_EQ(&made.source_state(), &sharding.source[1]);
  sharding.source[1].bytes = source_state_bytes + 1;
  EXPECT_THROW(made.source_state(), SessionError);
  sharding.source_index.store(2);
  EXPECT_THROW(made.source_state(), SessionError);
}

}  // namespace
}  // namespace accelmgr::session
