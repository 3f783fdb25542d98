// Fuzz tests of Session::attach(). They damage the header, the manifest and the descriptors, as another
// program or a bug may. A process that has attached such a session must be able to use all of it without
// leaving its memory.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "engine/session/batch_queue.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/session.hpp"
#include "fuzzed.hpp"
#include "session_support.hpp"
#include "used_session.hpp"

namespace accelmgr::session {
namespace {

using nlohmann::json;
using test::Fuzzed;

constexpr int rounds = 2000;

std::vector<base::UniqueFd> descriptors_of(Session& session) {
  std::vector<base::UniqueFd> out;
  for (const int fd : session.fds()) out.push_back(base::duplicate(fd));
  return out;
}

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

  /// Changes `size` bytes at `at` in many ways. Returns how often the session was used although it was
  /// changed.
  int used_of_damaged(std::byte* at, std::size_t size) {
    const std::vector<std::byte> before(at, at + size);
    int used = 0;
    for (int round = 0; round < rounds; ++round) {
      fuzzed.damage(at, size);
      used += is_used(descriptors_of(made)) ? 1 : 0;
      std::copy(before.begin(), before.end(), at);
    }
    EXPECT_TRUE(is_used(descriptors_of(made))) << "as it was";
    return used;
  }

  Fuzzed fuzzed{20261122};
  Manifest manifest = some_manifest();
  Session made = session_of(manifest, 2);
};

TEST_F(SessionFuzz, ADamagedHeaderIsRefused) {
  // A few changes cannot be seen: they write the bytes that were there.
  EXPECT_LT(used_of_damaged(memory_of(made), sizeof(Header)), rounds / 20);
}

TEST_F(SessionFuzz, ADamagedManifestIsRefusedOrNamesOtherwiseWhatLiesThere) {
  std::uint64_t length = 0;
  std::memcpy(&length, made.manifest().data(), sizeof length);
  // A changed letter of a name is damage that cannot be seen.
  EXPECT_LT(used_of_damaged(made.manifest().data(), sizeof length + length), rounds / 2);
}

TEST_F(SessionFuzz, AManifestOfOtherValuesIsRefused) {
  const auto region = made.manifest();
  std::uint64_t length = 0;
  std::memcpy(&length, region.data(), sizeof length);
  const std::vector<std::byte> before(region.begin(), region.end());
  const auto valid = json::from_cbor(std::string(reinterpret_cast<const char*>(region.data()) + 8, length));
  int used = 0, written = 0;
  for (int round = 0; round < rounds; ++round) {
    const auto text = json::to_cbor(fuzzed.mutated(valid));
    length = text.size();
    if (sizeof length + length > region.size()) continue;
    ++written;
    std::memcpy(region.data(), &length, sizeof length);
    std::memcpy(region.data() + sizeof length, text.data(), length);
    used += is_used(descriptors_of(made)) ? 1 : 0;
  }
  EXPECT_GT(written, rounds / 2);
  EXPECT_LT(used, written / 3) << "names and flags may be others";
  std::copy(before.begin(), before.end(), region.begin());
  EXPECT_TRUE(is_used(descriptors_of(made)));
}

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
  const std::vector<std::byte> header(memory_of(made), memory_of(made) + sizeof(Header));
  std::fill_n(memory_of(made), sizeof(Header), std::byte{0xff});
  EXPECT_EQ(attached.header().parameters, before);
  use(attached);
  std::copy(header.begin(), header.end(), memory_of(made));
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

TEST_F(SessionFuzz, ARefusalSaysWhatIsWrongAndWhatIsRight) {
  manifest.tensors[1].shape = {400000};
  write_manifest(manifest, made.manifest());
  try {
    read_manifest(made);
    FAIL() << "400000 elements were taken";
  } catch (const SessionError& error) {
    EXPECT_EQ(
        std::string(error.what()),
        fmt::format("the manifest of the session: tensor 'bias': count is 400000; it must be small enough to "
                    "end within the {} bytes of the parameters",
                    made.header().bytes.parameters));
  }
}

}  // namespace
}  // namespace accelmgr::session
