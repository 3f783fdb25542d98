// A training without processes: a session, a loader stepped by hand, and steps that consume what it deals.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "data/loader.hpp"
#include "session/batch_queue.hpp"

namespace accelmgr::data {

/// What a source of the numbers 0, 1, 2, ... gives.
struct NumbersPlan {
  std::int64_t count = 0;
  std::int64_t fails_at = -1;   ///< Throws instead of giving this number.
  bool states = false;          ///< It says where it stands.
  std::size_t state_bytes = 0;  ///< If more than needed.
  std::function<void(std::int64_t, ElementWriter&)> interfere = {};  ///< Before it gives a number.
  // By all sources of this plan.
  std::shared_ptr<std::uint64_t> reads = std::make_shared<std::uint64_t>(0);
  std::shared_ptr<std::uint64_t> asked = std::make_shared<std::uint64_t>(0);  ///< For its state.
};

/// Each number as two fields, of which a loader must keep both together.
class Numbers final : public BatchSource {
 public:
  explicit Numbers(NumbersPlan plan) : plan_(std::move(plan)) {}

  std::span<const FieldSpec> fields() const override { return fields_; }
  bool next(ElementWriter& element) override {
    if (next_ == plan_.fails_at) throw DataError("number " + std::to_string(next_) + " is missing");
    if (next_ == plan_.count) return false;
    if (plan_.interfere) plan_.interfere(next_, element);
    ++*plan_.reads;
    std::memcpy(element.bytes(0).data(), &next_, sizeof next_);
    std::memset(element.bytes(1).data(), tag_of(next_), element.bytes(1).size());
    ++next_;
    return true;
  }
  std::optional<std::string> state() const override {
    ++*plan_.asked;
    if (!plan_.states) return std::nullopt;
    auto text = std::to_string(next_);
    text.resize(std::max(plan_.state_bytes, text.size()), ' ');
    return text;
  }
  void restore(const std::string& state) override {
    ASSERT_TRUE(plan_.states) << "there was no state to restore";
    next_ = std::stoll(state);
  }

  static int tag_of(std::int64_t number) { return static_cast<int>(number % 251); }

 private:
  NumbersPlan plan_;
  std::vector<FieldSpec> fields_{{"number", at::kLong, {}}, {"tag", at::kByte, {3}}};
  std::int64_t next_ = 0;
};

struct Shape {
  int ranks = 2;
  std::uint64_t slots = 4;
  int batch_size = 1;
  bool drop_last = true;
  std::uint64_t micro_batches = 1;
};

/// A session as new. Making one takes milliseconds and tests make thousands of trainings, so one that is no
/// longer used is used again.
class ReusedSession {
 public:
  explicit ReusedSession(const session::Extent& extent)
      : key_{std::uint64_t(extent.ranks), extent.slots, extent.slot_bytes} {
    if (auto found = idle().find(key_); found != idle().end()) {
      made_ = std::move(found->second);
      idle().erase(found);
      std::memcpy(state(), made_->as_new.data(), made_->as_new.size());
      return;
    }
    made_.emplace(Made{session::Session::create(extent, extent.ranks, 1), {}});
    const auto& header = made_->session.header();
    made_->as_new.assign(state(), state() + (header.parameters - header.control));
  }
  ~ReusedSession() { idle().emplace(key_, std::move(*made_)); }
  ReusedSession(const ReusedSession&) = delete;
  ReusedSession& operator=(const ReusedSession&) = delete;

  const session::Session& session() const { return made_->session; }

 private:
  using Key = std::array<std::uint64_t, 3>;
  struct Made {
    session::Session session;
    std::vector<std::byte> as_new;  ///< All from `control` to the parameters.
  };
  static std::multimap<Key, Made>& idle() {
    static std::multimap<Key, Made> all;
    return all;
  }
  std::byte* state() const { return reinterpret_cast<std::byte*>(&made_->session.control()); }

  Key key_;
  std::optional<Made> made_;
};

class Training {
 public:
  /// `team` 0: all ranks.
  Training(Shape shape, NumbersPlan plan, session::RankMask team = 0)
      : shape_(shape),
        plan_(std::move(plan)),
        team_(team == 0 ? session::all_ranks(shape.ranks) : team),
        reused_(extent()) {
    base::log().set_level(spdlog::level::off);  // Thousands of trainings end.
  }

  const session::Session& session() const { return session_; }
  session::Dealing& dealing() const { return session_.dealing(); }
  session::Counters& counters() const { return session_.counters(session_.word().index); }
  std::uint64_t cursor() const { return counters().elements; }

  /// The loader, made when it is first wanted.
  Loader& loader() {
    if (!loader_)
      loader_.emplace(std::make_unique<Numbers>(plan_), session_, manifest_, shape_.batch_size,
                      shape_.drop_last, team_);
    return *loader_;
  }
  /// The loader's end, however it came; the next one begins from a fresh source.
  void kill() { loader_.reset(); }
  /// Of the next loader.
  NumbersPlan& plan() { return plan_; }
  void begin_with(session::RankMask team) { team_ = team; }
  void work() {
    while (loader().do_work()) {
    }
  }
  void work(int calls) {
    for (int i = 0; i < calls; ++i) loader().do_work();
  }
  /// The host's part of a re-deal.
  void ask_for(session::RankMask team) {
    team_ = team;
    session_.control().deal_to.store(team);
  }
  void deal_to(session::RankMask team) {
    loader();
    ask_for(team);
    loader().do_work();
    ASSERT_EQ(dealing().dealt_to.load(), team);
  }

  /// A step of those it is dealt to, as runners and reduction make it. Checks that it consumes just the
  /// elements that follow the cursor, each where it belongs. False: the queues hold no step.
  bool step() {
    std::vector<std::vector<std::int64_t>> taken;
    const auto index = session_.word().index;
    auto& after = session_.counters(index ^ 1);
    after = session_.counters(index);
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      if ((dealing().dealt_to.load() >> rank & 1) == 0) continue;
      auto& numbers = taken.emplace_back();
      for (std::uint64_t i = 0; i < shape_.micro_batches; ++i) {
        const auto number = session_.counters(index).batches[rank] + i;
        const auto state = this->state(rank, number);
        if (state == session::BatchQueue::State::ended && !shape_.drop_last && !(taken.size() == 1 && i == 0))
          break;
        if (state != session::BatchQueue::State::filled) return false;
        const auto some = batch(rank, number);
        numbers.insert(numbers.end(), some.begin(), some.end());
        ++after.batches[rank];
        if (some.size() < static_cast<std::size_t>(shape_.batch_size)) break;
      }
    }
    after.elements += expect_next(taken);
    attempt(true);
    return true;
  }
  void abort() { attempt(false); }
  /// Steps until the data has ended, and checks that nothing is left but what `drop_last` leaves.
  void finish() {
    for (;;) {
      work();
      if (!step()) break;
    }
    EXPECT_TRUE(loader().finished());
    const auto left = static_cast<std::uint64_t>(plan_.count) - cursor();
    const auto step_elements =
        round_elements(dealing().dealt_to.load(), static_cast<std::uint64_t>(shape_.batch_size)) *
        shape_.micro_batches;
    if (shape_.drop_last) {
      EXPECT_LT(left, step_elements) << "elements of a whole step were not trained";
    } else {
      EXPECT_EQ(left, 0u);
    }
  }

  session::BatchQueue::State state(int rank, std::uint64_t number) const {
    session::BatchQueue::Filled filled{};
    return session::BatchQueue(session_, rank).look(number, filled);
  }
  /// The numbers of a batch; empty when it is not there.
  std::vector<std::int64_t> batch(int rank, std::uint64_t number) const {
    session::BatchQueue::Filled filled{};
    if (session::BatchQueue(session_, rank).look(number, filled) != session::BatchQueue::State::filled)
      return {};
    std::vector<std::int64_t> numbers(filled.elements);
    std::memcpy(numbers.data(), filled.slot + manifest_.fields[0].offset,
                filled.elements * sizeof(std::int64_t));
    const auto* tags = reinterpret_cast<const std::uint8_t*>(filled.slot + manifest_.fields[1].offset);
    for (std::size_t i = 0; i < 3 * numbers.size(); ++i) EXPECT_EQ(tags[i], Numbers::tag_of(numbers[i / 3]));
    return numbers;
  }

 private:
  session::Extent extent() {
    manifest_.fields = field_entries(Numbers(plan_).fields());
    session::Extent extent{.ranks = shape_.ranks, .element = session::Element::f32};
    extent.elements = 16;  // A session has parameters.
    extent.tensors = 1;
    extent.slot_bytes = manifest_.place_fields(static_cast<std::uint64_t>(shape_.batch_size));
    extent.slots = shape_.slots;
    extent.manifest_bytes = session::manifest_bytes(manifest_);
    return extent;
  }
  std::uint64_t expect_next(const std::vector<std::vector<std::int64_t>>& taken) const {
    std::uint64_t total = 0;
    for (const auto& numbers : taken) total += numbers.size();
    for (std::uint64_t i = 0; i < total; ++i) {
      const auto& numbers = taken[i % taken.size()];
      const auto row = i / taken.size();
      EXPECT_TRUE(row < numbers.size() && numbers[row] == static_cast<std::int64_t>(cursor() + i))
          << "element " << i << " of the step that begins with " << cursor();
    }
    return total;
  }
  void attempt(bool commit) {
    auto& word = session_.control().word;
    const session::RankMask participants = dealing().dealt_to.load();
    const auto number = session::open(word);
    if (commit) {
      for (int rank = 0; rank < shape_.ranks; ++rank)
        if ((participants >> rank & 1) != 0) session::vote(word, number, rank, participants);
    } else {
      session::abort(word, number, session::author_host, participants);
    }
    ASSERT_TRUE(session::close(word, number, participants));
  }

  Shape shape_;
  NumbersPlan plan_;
  session::RankMask team_;
  session::Manifest manifest_;
  ReusedSession reused_;
  const session::Session& session_ = reused_.session();
  std::optional<Loader> loader_;
};

}  // namespace accelmgr::data
