#include "data/loader.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "accelmgr/errors.hpp"
#include "session/batch_queue.hpp"

namespace accelmgr::data {
namespace {

using session::BatchQueue;

/// The numbers 0, 1, 2, ... up to `count`; throws instead of giving number `fails_at`.
class Numbers final : public BatchSource {
 public:
  explicit Numbers(std::int64_t count, std::int64_t fails_at = -1) : count_(count), fails_at_(fails_at) {}
  std::span<const FieldSpec> fields() const override { return fields_; }
  bool next(ElementWriter& element) override {
    if (next_ == fails_at_) throw DataError("number " + std::to_string(next_) + " is missing");
    if (next_ == count_) return false;
    std::memcpy(element.bytes(0).data(), &next_, sizeof next_);
    ++next_;
    return true;
  }

 private:
  std::vector<FieldSpec> fields_{{"number", at::kLong, {}}};
  std::int64_t count_, fails_at_, next_ = 0;
};

struct Loading {
  Loading(int ranks, std::uint64_t slots, int batch_size, bool drop_last, Numbers numbers)
      : session(make(ranks, slots, batch_size)),
        loader(std::make_unique<Numbers>(std::move(numbers)), session, manifest, batch_size, drop_last) {}

  session::Session make(int ranks, std::uint64_t slots, int batch_size) {
    manifest.fields = field_entries(Numbers(0).fields());
    session::Extent extent{.ranks = ranks, .element = session::Element::f32};
    extent.elements = 16;  // A session has parameters.
    extent.tensors = 1;
    extent.slot_bytes = manifest.place_fields(static_cast<std::uint64_t>(batch_size));
    extent.slots = slots;
    extent.manifest_bytes = session::manifest_bytes(manifest);
    return session::Session::create(extent, extent.ranks, 1);
  }
  std::vector<std::int64_t> batch(int rank, std::uint64_t number) {
    BatchQueue::Filled filled{};
    if (BatchQueue(session, rank).look(number, filled) != BatchQueue::State::filled) return {};
    std::vector<std::int64_t> out(filled.elements);
    std::memcpy(out.data(), filled.slot, filled.elements * sizeof(std::int64_t));
    return out;
  }
  BatchQueue::State state(int rank, std::uint64_t number) {
    BatchQueue::Filled filled{};
    return BatchQueue(session, rank).look(number, filled);
  }
  void work() {
    while (loader.do_work()) {
    }
  }

  session::Manifest manifest;
  session::Session session;
  Loader loader;
};

using Batch = std::vector<std::int64_t>;

TEST(Loader, DealsElementIToDeviceIModNAndCollatesEachDevicesOwn) {
  Loading l(2, 4, 2, true, Numbers(8));
  l.work();
  EXPECT_EQ(l.batch(0, 0), (Batch{0, 2}));
  EXPECT_EQ(l.batch(1, 0), (Batch{1, 3}));
  EXPECT_EQ(l.batch(0, 1), (Batch{4, 6}));
  EXPECT_EQ(l.batch(1, 1), (Batch{5, 7}));
}

TEST(Loader, AFullQueueStopsTheDealingAndWhatIsThereStaysUsable) {
  Loading l(2, 1, 1, true, Numbers(100));
  l.work();
  EXPECT_EQ(l.loader.dealt(), 2u) << "device 0 is full";
  EXPECT_FALSE(l.loader.finished());
  EXPECT_EQ(l.batch(1, 0), (Batch{1}));
  l.session.counters(l.session.word().index).batches[0] = 1;
  l.work();
  EXPECT_EQ(l.loader.dealt(), 3u);
  EXPECT_EQ(l.batch(0, 1), (Batch{2}));
}

TEST(Loader, AnUnevenEndIsLeftOutAndCounted) {
  Loading l(2, 4, 3, true, Numbers(8));
  l.work();
  EXPECT_TRUE(l.loader.finished());
  EXPECT_EQ(l.batch(0, 0), (Batch{0, 2, 4}));
  EXPECT_EQ(l.state(0, 1), BatchQueue::State::ended);
  EXPECT_EQ(l.loader.dropped(), 2u) << "6 and 7 made no full batch";
}

TEST(Loader, AnUnevenEndMakesAShortBatchWhenAsked) {
  Loading l(2, 4, 3, false, Numbers(7));
  l.work();
  EXPECT_EQ(l.batch(0, 1), (Batch{6}));
  EXPECT_EQ(l.state(1, 1), BatchQueue::State::ended);
  EXPECT_EQ(l.loader.dropped(), 0u);
}

TEST(Loader, AnErrorOfTheSourceReachesEveryDevice) {
  Loading l(2, 4, 1, true, Numbers(100, 3));
  l.work();
  EXPECT_EQ(l.state(1, 0), BatchQueue::State::filled);
  EXPECT_EQ(l.state(1, 1), BatchQueue::State::failed);
  EXPECT_EQ(l.state(0, 2), BatchQueue::State::failed);
  EXPECT_EQ(BatchQueue(l.session, 0).error(), "number 3 is missing");
}

}  // namespace
}  // namespace accelmgr::data
