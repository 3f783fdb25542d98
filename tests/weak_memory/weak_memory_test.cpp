// What processes leave for each other in shared memory, on processors that order less than x86 does. The
// functions are those of the sources; see modelled_atomic.hpp. Each model holds, and is found broken once a
// variable's orders, or the fences, are taken away.
#include <gtest/gtest.h>

#include <string>

#include "modelled_atomic.hpp"
//
#include "base/ipc/epoch.cpp"
#include "engine/session/sequence_lock.hpp"
#include "engine/session/shared_words.hpp"
#include "engine/session/step_word.cpp"
#include "launcher/collective/shm/parking.hpp"

namespace accelmgr::weak_memory {
namespace {

constexpr std::int64_t for_ever = std::int64_t{1} << 60;

/// Plain memory: Relacy reports an access that no order separates from a write.
class Plain {
 public:
  void set(int value) { value_(nowhere) = value; }
  int get() { return value_(nowhere); }

 private:
  rl::var<int> value_;
};

/// Keeps the beginning of what is written. It allocates nothing, because Relacy replaces `new` while a model
/// runs.
class Said : public std::streambuf {
 public:
  Said() { setp(text_.data(), text_.data() + text_.size()); }
  std::string text() const { return {pbase(), pptr()}; }

 private:
  std::array<char, 8192> text_;
};

/// Runs `Model` in many orders. Empty: none breaks it; otherwise what Relacy says of the first that does.
template <class Model>
std::string broken(int orders = 20'000) {
  Said said;
  std::ostream stream(&said);
  rl::test_params parameters;
  parameters.iteration_count = static_cast<rl::iteration_t>(orders);
  parameters.output_stream = &stream;
  parameters.progress_stream = &stream;
  return rl::simulate<Model>(parameters) ? std::string() : said.text();
}

/// The model without the orders of the variable that it calls `name`.
template <class Model>
std::string broken_without(const std::string& name) {
  Model::without = name;
  auto found = broken<Model>();
  Model::without.clear();
  return found;
}

template <class Model, int threads>
struct Relaxable : rl::test_suite<Model, threads> {
  inline static std::string without;
  void may_relax(const std::string& name, const void* what) {
    if (without == name) relaxed = what;
  }
  void after() { relaxed = nullptr; }
};

// ---- An attempt ----

/// A host makes two attempts of two runners. The last to vote reduces.
struct Attempts : Relaxable<Attempts, 3> {
  std::atomic<std::uint64_t> word;
  Plain request, slab[2], mean;

  void before() {
    word.set(session::initial_step_word);
    may_relax("word", &word);
  }
  void thread(unsigned index) {
    for (int attempt = 1; attempt <= 2; ++attempt)
      index == 0 ? host(attempt) : runner(attempt, int(index) - 1);
  }
  void host(int attempt) {
    request.set(attempt);
    RL_ASSERT(session::open(word) == std::uint64_t(attempt));
    while (!session::load(word).closed) rl::yield(1, nowhere);
    RL_ASSERT(mean.get() == 21 * attempt);
  }
  void runner(int attempt, int rank) {
    constexpr session::RankMask all = 3;
    for (auto seen = session::load(word); seen.closed || seen.attempt != std::uint64_t(attempt);
         seen = session::load(word))
      rl::yield(1, nowhere);
    slab[rank].set((rank == 0 ? 1 : 20) * request.get());
    if (session::vote(word, std::uint64_t(attempt), rank, all) != session::Vote::committed) return;
    mean.set(slab[0].get() + slab[1].get());
    RL_ASSERT(session::close(word, std::uint64_t(attempt), all));
  }
};

TEST(WeakMemory, AnAttemptHandsOverItsRequestItsSlabsAndItsMean) {
  EXPECT_EQ(broken<Attempts>(), "");
  EXPECT_NE(broken_without<Attempts>("word"), "");
}

// ---- Waking ----

struct Waking : Relaxable<Waking, 2> {
  ipc::Epoch epoch;
  Plain value;
  std::atomic<std::uint32_t> is_set;

  void before() {
    epoch.value.set(0);
    epoch.waiters.set(0);
    is_set.set(0);
    may_relax("value", &epoch.value);
    may_relax("waiters", &epoch.waiters);
  }
  void thread(unsigned index) {
    if (index == 0) {
      value.set(1);
      is_set.store(1, std::memory_order_relaxed);
      ipc::advance(epoch);
      return;
    }
    for (;;) {
      const auto seen = ipc::load(epoch);
      if (is_set.load(std::memory_order_relaxed) == 1) break;
      ipc::wait_changed(epoch, seen, for_ever, 0);
    }
    if (ipc::load(epoch) != 0) RL_ASSERT(value.get() == 1);
  }
};

TEST(WeakMemory, AnEpochLosesNoWakeUp) {
  EXPECT_EQ(broken<Waking>(), "");
  EXPECT_NE(broken_without<Waking>("value"), "");
  EXPECT_NE(broken_without<Waking>("waiters"), "");
}

/// Two members of a group arrive and wait for each other: launcher/collective/shm/group.cpp.
struct Meeting : Relaxable<Meeting, 2> {
  collective::shm::Parking parking;
  std::atomic<std::uint64_t> round[2];
  Plain posted[2];

  void before() {
    parking.epoch.value.set(0);
    parking.epoch.waiters.set(0);
    parking.parked.set(0);
    for (auto& one : round) one.set(0);
    may_relax("parked", &parking.parked);
    may_relax("round", &round[0]);
  }
  bool has_arrived(int member) const { return round[member].load(std::memory_order_seq_cst) == 1; }
  void thread(unsigned me) {
    posted[me].set(1);
    round[me].exchange(1, std::memory_order_seq_cst);
    if (collective::shm::anybody_parked(parking) && round[1 - me].load(std::memory_order_seq_cst) == 1)
      ipc::wake_all(parking.epoch);
    for (;;) {
      collective::shm::Parked parked(parking);
      if (has_arrived(1 - int(me))) break;
      parked.wait(for_ever);
    }
    RL_ASSERT(posted[1 - me].get() == 1);
  }
};

TEST(WeakMemory, MembersOfAGroupDoNotMissEachOther) {
  EXPECT_EQ(broken<Meeting>(), "");
  EXPECT_NE(broken_without<Meeting>("parked"), "");
  EXPECT_NE(broken_without<Meeting>("round"), "");
}

// ---- A copy of what is being written ----

struct Copying : Relaxable<Copying, 2> {
  session::Version version;
  std::atomic<int> data[2];

  void before() {
    version.set(0);
    for (auto& one : data) one.set(0);
    may_relax("version", &version);
    may_relax("fences", &fences);
  }
  void thread(unsigned index) { index == 0 ? write() : copy(); }
  void write() {
    for (int value = 1; value <= 2; ++value) {
      session::begin_write(version);
      for (auto& one : data) one.store(value, std::memory_order_relaxed);
      session::end_write(version);
    }
  }
  void copy() {
    const auto before = version.load();
    if (before % 2 != 0) return;
    int seen[2];
    for (int i = 0; i < 2; ++i) seen[i] = data[i].load(std::memory_order_relaxed);
    session::end_copy();
    if (version.load() == before) RL_ASSERT(seen[0] == int(before) / 2 && seen[1] == int(before) / 2);
  }
};

TEST(WeakMemory, ACopyIsWholeOrKnownNotToBe) {
  EXPECT_EQ(broken<Copying>(), "");
  EXPECT_NE(broken_without<Copying>("version"), "");
  EXPECT_NE(broken_without<Copying>("fences"), "");
}

/// The records of steps and the spans: three entries in a ring that keeps two.
struct Recording : Relaxable<Recording, 2> {
  struct Entry {
    std::uint64_t first, second;
  };
  session::SharedWords<Entry> ring[3];
  std::atomic<std::uint64_t> recorded;

  void before() {
    recorded.set(0);
    for (auto& place : ring)
      for (auto& word : place) word.set(0);
    may_relax("recorded", &recorded);
    may_relax("word", &ring[2][1]);
  }
  void thread(unsigned index) {
    if (index == 0)
      for (std::uint64_t number = 1; number <= 5; ++number)
        session::append<Entry>(ring, recorded, {number, 10 * number});
    else
      for (std::uint64_t number = 1; number <= 5; ++number)
        if (const auto found = session::entry<Entry>(ring, recorded, number))
          RL_ASSERT(found->first == number && found->second == 10 * number);
  }
};

TEST(WeakMemory, AnEntryOfARingIsWholeOrNotThere) {
  EXPECT_EQ(broken<Recording>(), "");
  EXPECT_NE(broken_without<Recording>("recorded"), "");
  EXPECT_NE(broken_without<Recording>("word"), "");
}

}  // namespace
}  // namespace accelmgr::weak_memory
