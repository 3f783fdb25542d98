// A training without processes: a session, a loader stepped by hand, and steps that consume what it assigns.
#pragma once

#include <gtest/gtest.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/ipc/pages.hpp"
#include "base/log.hpp"
#include "engine/data/loader.hpp"
#include "engine/session/batch_queue.hpp"

namespace accelmgr::data {

/// How a source of the numbers 0, 1, 2, ... behaves.
struct NumbersPlan {
  std::int64_t count = 0;
  std::int64_t epoch = 0;       ///< Elements of an epoch; 0: there is one.
  std::int64_t fails_at = -1;   ///< Throws instead of giving this number.
  bool states = false;          ///< The source can tell its state.
  std::size_t state_bytes = 0;  ///< The least size of a state.
  std::function<void(std::int64_t, ElementWriter&)> interfere = {};  ///< Called before a number.
  /// The numbers that all sources of this plan gave.
  std::shared_ptr<std::uint64_t> reads = std::make_shared<std::uint64_t>(0);
};

/// Gives each number as two fields: a loader must keep the fields of an element together.
class Numbers final : public BatchSource {
 public:
  explicit Numbers(NumbersPlan plan) : plan_(std::move(plan)) {}

  std::span<const FieldSpec> fields() const override { return fields_; }
  bool next(ElementWriter& element) override {
    if (next_ == plan_.fails_at) throw DataError("number " + std::to_string(next_) + " is missing");
    if (ended_) end_ += plan_.epoch;
    ended_ = next_ == end_ && more_epochs();
    if (next_ == plan_.count || next_ == end_) return false;
    if (plan_.interfere) plan_.interfere(next_, element);
    ++*plan_.reads;
    std::memcpy(element.bytes(0).data(), &next_, sizeof next_);
    std::memset(element.bytes(1).data(), tag_of(next_), element.bytes(1).size());
    ++next_;
    return true;
  }
  bool more_epochs() const override { return plan_.epoch > 0 && end_ < plan_.count; }
  std::optional<std::string> state() const override {
    if (!plan_.states) return std::nullopt;
    auto text = std::to_string(next_);
    text.resize(std::max(plan_.state_bytes, text.size()), ' ');
    return text;
  }
  void restore(const std::string& state) override {
    ASSERT_TRUE(plan_.states) << "there was no state to restore";
    next_ = std::stoll(state);
    while (plan_.epoch > 0 && end_ < next_) end_ += plan_.epoch;
  }
  std::string reading(std::uint64_t number) const override {
    return "numbers[" + std::to_string(number) + "]";
  }

  static int tag_of(std::int64_t number) { return static_cast<int>(number % 251); }

 private:
  NumbersPlan plan_;
  std::vector<FieldSpec> fields_{{"number", DType::int64, {}}, {"tag", DType::uint8, {3}}};
  std::int64_t next_ = 0;
  std::int64_t end_ = plan_.epoch > 0 ? plan_.epoch : -1;  ///< Where the epoch ends; -1: there are no epochs.
  bool ended_ = false;
};

/// Ranks to assign to, and the micro-batches of each of them in a step, by rank. No shares: those of Shape.
struct Team {
  Team(session::RankMask ranks) : mask(ranks) {}
  Team(session::RankMask ranks, std::vector<std::uint32_t> shares_of_all)
      : mask(ranks), shares(std::move(shares_of_all)) {}
  session::RankMask mask;
  std::vector<std::uint32_t> shares{};
};

struct Shape {
  int ranks = 2;
  std::uint64_t slots = 4;
  int batch_size = 1;
  bool drop_last = true;
  std::uint32_t micro_batches = 1;
  int prefetch = 1'000;  ///< By default, the slots alone limit how far the loader goes ahead.
  bool keeps_last_step = false;
};

/// A session in its initial state. Creating one takes milliseconds and tests make thousands of trainings, so
/// sessions are kept and used again.
class ReusedSession {
 public:
  explicit ReusedSession(const session::Extent& extent)
      : key_{std::uint64_t(extent.ranks), extent.slots, extent.slot_bytes, extent.batch_size,
             extent.keeps_last_step} {
    if (auto found = idle().find(key_); found != idle().end()) {
      made_ = std::move(found->second);
      idle().erase(found);
      restore();
      return;
    }
    made_.emplace(Made{session::Session::create(extent, extent.ranks, 1), {}});
    for (std::size_t begin = 0, end = head(); begin < state().size(); begin = end, end += page) {
      const auto bytes = state().subspan(begin, end - begin);
      if (begin == 0 ||
          std::any_of(bytes.begin(), bytes.end(), [](std::byte value) { return value != std::byte{}; }))
        made_->written.emplace_back(begin, std::vector(bytes.begin(), bytes.end()));
    }
  }
  ~ReusedSession() { idle().emplace(key_, std::move(*made_)); }
  ReusedSession(const ReusedSession&) = delete;
  ReusedSession& operator=(const ReusedSession&) = delete;

  session::Session& session() { return made_->session; }

 private:
  using Key = std::array<std::uint64_t, 5>;
  struct Made {
    session::Session session;
    /// The pages that are not zero in a new session, and what is before the first page, with their places in
    /// state().
    std::vector<std::pair<std::size_t, std::vector<std::byte>>> written;
  };
  static std::multimap<Key, Made>& idle() {
    static std::multimap<Key, Made> all;
    return all;
  }
  static constexpr std::size_t page = ipc::largest_page_bytes;

  /// From `control` up to the parameters, which begin a page.
  std::span<std::byte> state() {
    const auto& header = made_->session.header();
    return {reinterpret_cast<std::byte*>(&made_->session.control()), header.parameters - header.control};
  }

  /// The bytes before the first whole page.
  std::size_t head() { return page - reinterpret_cast<std::uintptr_t>(state().data()) % page; }

  /// The kernel takes the pages away, which is far faster than to write all of them where the thread
  /// sanitizer looks at each word: most are zero.
  void restore() {
    if (madvise(state().data() + head(), state().size() - head(), MADV_REMOVE) != 0)
      throw std::system_error(errno, std::generic_category(), "madvise");
    for (const auto& [begin, bytes] : made_->written)
      std::memcpy(state().data() + begin, bytes.data(), bytes.size());
  }

  Key key_;
  std::optional<Made> made_;
};

class Training {
 public:
  /// `team` 0: all ranks.
  Training(Shape shape, NumbersPlan plan, const Team& team = 0)
      : shape_(shape), plan_(std::move(plan)), reused_(extent()) {
    base::log().spdlog().set_level(spdlog::level::off);  // Thousands of trainings would log their end.
    ask_for(team.mask == 0 ? Team(session::all_ranks(shape.ranks)) : team);
  }

  session::Session& session() const { return session_; }
  session::Sharding& sharding() const { return session_.sharding(); }
  session::Counters& counters() const { return session_.counters(session_.word().index); }
  std::uint64_t cursor() const { return counters().elements; }

  /// Makes the loader if there is none.
  Loader& loader() {
    if (!loader_)
      loader_.emplace(std::make_unique<Numbers>(plan_), session_, manifest_,
                      Loading{.batch_size = shape_.batch_size,
                              .prefetch = shape_.prefetch,
                              .drop_last = shape_.drop_last,
                              .reads_again = reads_again_});
    return *loader_;
  }
  /// Ends the loader. loader() makes the next one, with a new source.
  void kill(bool reads_again = false) {
    loader_.reset();
    reads_again_ = reads_again;
  }
  /// The plan of the next loader's source.
  NumbersPlan& plan() { return plan_; }
  void work() {
    while (loader().do_work()) {
    }
  }
  void work(int calls) {
    for (int i = 0; i < calls; ++i) loader().do_work();
  }
  /// The host's part of a resharding.
  void ask_for(const Team& team) {
    session::Assignment to{team.mask, session::even_shares(shape_.micro_batches)};
    std::ranges::copy(team.shares, to.shares.of);
    session::HostView(session_).ask_for(to);
    ++asked_;
    most_step_elements_ = std::max(most_step_elements_, session::total_of(to.shares, to.team) *
                                                            static_cast<std::uint64_t>(shape_.batch_size));
  }
  bool loader_follows() const { return sharding().follows.load() == session_.control().assignments.load(); }
  void assign_to(const Team& team) {
    loader();
    ask_for(team);
    while (!loader_follows()) loader().do_work();
    ASSERT_EQ(sharding().assigned_to.load(), team.mask);
    ASSERT_EQ(sharding().shares, session_.control().assignment.shares);
  }

  /// Makes a step of the assigned team, as runners and reduction would. Checks that it consumes just the
  /// elements that follow the cursor, each on its rank and in its place; of one epoch; and all of a step, or
  /// the rest of the epoch or of the data, which must be left out with `drop_last`. Returns false if the
  /// queues hold no step.
  bool step() {
    check_last_step();
    std::vector<std::vector<std::int64_t>> taken;
    std::uint64_t left_out = 0;
    const auto index = session_.word().index;
    auto& after = session_.counters(index ^ 1);
    after = session_.counters(index);
    std::ranges::fill(after.last_batches, 0);
    std::map<std::pair<int, std::uint64_t>, std::vector<std::int64_t>> batches;
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      if ((sharding().assigned_to.load() >> rank & 1) == 0) continue;
      auto& numbers = taken.emplace_back();
      for (std::uint64_t i = 0; i < sharding().shares.of[rank]; ++i) {
        const auto number = session_.counters(index).batches[rank] + i;
        const auto state = this->state(rank, number);
        if (state != session::BatchQueue::State::filled && state != session::BatchQueue::State::none)
          return false;
        const auto some = batch(rank, number);
        numbers.insert(numbers.end(), some.begin(), some.end());
        left_out += session::BatchQueue(session_, rank).left_out(number);
        batches[{rank, number}] = some;
        after.batches[rank] = after.batches[rank] + 1;
        after.last_batches[rank] = after.last_batches[rank] + 1;
      }
    }
    after.last_elements = left_out + expect_next(taken, cursor() + left_out);
    after.elements = after.elements + after.last_elements;
    attempt(true);
    if (shape_.keeps_last_step) last_step_ = std::move(batches);
    return true;
  }
  void abort() { attempt(false); }
  /// Makes steps until the data has ended. Checks that all elements are consumed: with `drop_last`, all but
  /// less than a step.
  void finish() {
    for (;;) {
      work();
      if (!step()) break;
    }
    EXPECT_TRUE(loader().finished());
    const auto count = static_cast<std::uint64_t>(plan_.count);
    if (!shape_.drop_last) {
      EXPECT_EQ(cursor(), count);
    }
    // Of an epoch. What an earlier team left out is gone when a later one leaves out what that team has
    // dealt.
    const auto most = most_step_elements_ * (shape_.drop_last && asked_ > 1 && plan_.epoch > 0 ? 2 : 1);
    std::uint64_t left = 0;
    for (auto element = cursor(); element < count; ++element) {
      left = ends_epoch(element) ? 1 : left + 1;
      EXPECT_LT(left, most) << "elements of a whole step were not trained";
    }
  }
  /// Elements that were left out at the ends of epochs.
  std::uint64_t left_out() const { return left_out_; }

  std::uint64_t step_elements() const {
    return session::total_of(sharding().shares, sharding().assigned_to.load()) *
           static_cast<std::uint64_t>(shape_.batch_size);
  }

  session::BatchQueue::State state(int rank, std::uint64_t number) const {
    session::BatchQueue::Filled filled{};
    return session::BatchQueue(session_, rank).look(number, filled);
  }
  /// The numbers of a batch, whose tags it checks; empty if the batch is not there.
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
    session::Extent extent{.ranks = shape_.ranks, .bytes = {.parameters = 64}};
    extent.tensors = 1;
    extent.slot_bytes = manifest_.place_fields(static_cast<std::uint64_t>(shape_.batch_size));
    extent.batch_size = static_cast<std::uint64_t>(shape_.batch_size);
    extent.slots = shape_.slots;
    extent.keeps_last_step = shape_.keeps_last_step;
    extent.manifest_bytes = session::manifest_bytes(manifest_);
    return extent;
  }
  bool ends_epoch(std::uint64_t element) const {
    return plan_.epoch > 0 && element % static_cast<std::uint64_t>(plan_.epoch) == 0;
  }
  /// Deals the elements from `first` on, one after the other, to the team's ranks in turn. A rank that has
  /// its share is passed over.
  std::uint64_t expect_next(const std::vector<std::vector<std::int64_t>>& taken, std::uint64_t first) {
    const auto batch_size = static_cast<std::size_t>(shape_.batch_size);
    std::vector<std::size_t> shares;
    for (int rank = 0; rank < shape_.ranks; ++rank)
      if ((sharding().assigned_to.load() >> rank & 1) != 0)
        shares.push_back(sharding().shares.of[rank] * batch_size);
    std::uint64_t total = 0;
    for (const auto& numbers : taken) total += numbers.size();
    std::uint64_t dealt = 0;
    for (std::size_t row = 0; dealt < total; ++row)
      for (std::size_t i = 0; i < taken.size() && dealt < total; ++i) {
        if (row >= shares[i]) continue;
        EXPECT_TRUE(row < taken[i].size() && taken[i][row] == static_cast<std::int64_t>(first + dealt))
            << "element " << dealt << " of the step that begins with " << first;
        EXPECT_TRUE(dealt == 0 || !ends_epoch(first + dealt))
            << "another epoch begins with " << first + dealt;
        ++dealt;
      }
    EXPECT_GT(total, 0u);
    EXPECT_TRUE(first == cursor() || (shape_.drop_last && ends_epoch(first))) << cursor() << " to " << first;
    left_out_ += first - cursor();
    if (total < step_elements()) {
      const auto end = first + total;
      EXPECT_TRUE(!shape_.drop_last && (ends_epoch(end) || end == static_cast<std::uint64_t>(plan_.count)))
          << total << " elements from " << first << " on are no step";
    }
    return total;
  }
  /// Whatever the loader has done since, it may be repeated.
  void check_last_step() const {
    for (const auto& [place, numbers] : last_step_) EXPECT_EQ(batch(place.first, place.second), numbers);
  }
  void attempt(bool commit) {
    auto& word = session_.control().word;
    const session::RankMask participants = sharding().assigned_to.load();
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
  bool reads_again_ = false;  ///< Whether the next loader reads again what was read ahead.
  NumbersPlan plan_;
  session::Manifest manifest_;
  ReusedSession reused_;
  session::Session& session_ = reused_.session();
  std::optional<Loader> loader_;
  std::uint64_t left_out_ = 0;
  std::uint64_t most_step_elements_ = 0;
  int asked_ = 0;  ///< How often a team was asked for.
  /// Rank and number of each batch of the last step, and its elements; empty if it is not kept.
  std::map<std::pair<int, std::uint64_t>, std::vector<std::int64_t>> last_step_;
};

}  // namespace accelmgr::data
