// Measures the round trip from the host to two runner processes and back from both.
//
//   ours           the session's trigger and finish epochs, waited on as host and runners do
//   futex          a bare futex: one counter each way, with a wake call even if no process sleeps
//   whole_attempt  the protocol of a whole step without the model: the attempt is opened, voted on, committed
//                  and closed. The vote is one more meeting of the runners than the two above have.
//
// Cases: runners are `parked` or `spinning`. While they spin, the host spins too if it has a core of its own.
// All take turns within one run.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/ipc/epoch.hpp"
#include "base/timing.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/reduction.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;

constexpr int runners = 2;
constexpr int spin_until_called_us = 1'000'000;

using Word = std::atomic<std::uint32_t>;

struct Shared {
  alignas(64) Word round;    ///< The round that the trigger epoch of `ours` announces.
  alignas(64) Word arrived;  ///< Arrivals of runners in all rounds of `ours` or of `futex`.
  alignas(64) Word bare_trigger;
  alignas(64) Word bare_finish;
};

void bare_wake(Word& word) {
  word.fetch_add(1);
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void bare_wait(Word& word, std::uint32_t seen, bool spins) {
  while (word.load(std::memory_order_acquire) == seen) {
    if (spins) {
      bench::relax();
    } else {
      syscall(SYS_futex, &word, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    }
  }
}

void wait_until(const ipc::Epoch& epoch, bool spins, const auto& done) {
  for (;;) {
    const auto seen = ipc::load(epoch);
    if (done()) return;
    ipc::wait_changed(epoch, seen, timing::look_ns, spins ? spin_until_called_us : 0);
  }
}

constexpr std::uint64_t elements = 16;

/// A model so small that its reduction takes no time.
session::Manifest one_tensor() {
  session::Manifest manifest;
  manifest.tensors.push_back({.name = "weight", .aliases = {}, .shape = {elements}, .count = elements});
  manifest.place_tensors();
  return manifest;
}

/// One way to trigger and to answer. `round` counts from 1 over the whole run, the same in all processes.
class Way {
 public:
  virtual ~Way() = default;
  virtual const char* name() const = 0;
  virtual void call(std::uint32_t round, bool spins) = 0;
  virtual void answer(int rank, std::uint32_t round, bool spins) = 0;
};

class Ours final : public Way {
 public:
  Ours(Shared& shared, session::Session& session) : shared_(shared), control_(session.control()) {}
  const char* name() const override { return "ours"; }

  void call(std::uint32_t round, bool spins) override {
    shared_.round.store(round);
    ipc::advance(control_.trigger);
    wait_until(control_.finish, spins, [&] { return shared_.arrived.load() == runners * round; });
  }
  void answer(int, std::uint32_t round, bool spins) override {
    wait_until(control_.trigger, spins, [&] { return shared_.round.load() >= round; });
    if (shared_.arrived.fetch_add(1) + 1 == runners * round) ipc::advance(control_.finish);
  }

 private:
  Shared& shared_;
  session::Control& control_;
};

class Futex final : public Way {
 public:
  explicit Futex(Shared& shared) : shared_(shared) {}
  const char* name() const override { return "futex"; }

  void call(std::uint32_t round, bool spins) override {
    bare_wake(shared_.bare_trigger);
    bare_wait(shared_.bare_finish, round - 1, spins);
  }
  void answer(int, std::uint32_t round, bool spins) override {
    bare_wait(shared_.bare_trigger, round - 1, spins);
    if (shared_.arrived.fetch_add(1) + 1 == runners * round) bare_wake(shared_.bare_finish);
  }

 private:
  Shared& shared_;
};

class WholeAttempt final : public Way {
 public:
  explicit WholeAttempt(session::Session& session) : session_(session), reduction_(session, one_tensor()) {}
  const char* name() const override { return "whole_attempt"; }

  void call(std::uint32_t, bool spins) override {
    const session::Request request{.participants = session::all_ranks(runners),
                                   .accumulate = 0,
                                   .shares = session::even_shares(1),
                                   .batch_size = 1,
                                   .loss_weights = session::LossWeights::micro_batches,
                                   .mean_buffers = 0,
                                   .parameter_version = 0};
    const auto attempt = session::open_attempt(session_, request);
    if (attempt == 0) throw std::runtime_error("trigger: the attempt before this one is still open");
    wait_until(session_.control().finish, spins, [&] { return session_.word().closed; });
  }
  void answer(int rank, std::uint32_t round, bool spins) override {
    auto& control = session_.control();
    wait_until(control.trigger, spins, [&] { return session_.word().attempt >= round; });
    reduction_.reset_cursor(rank, round);
    session::cast_vote({session_, rank}, round);
    wait_until(control.votes, spins, [&] { return session_.word().committed(control.request.participants); });
    reduction_.finish_slice(rank, round);
    session_.record(rank).acknowledged_attempt.store(round);
    ipc::advance(control.readiness);
    session::close_if_over(session_, round);
  }

 private:
  session::Session& session_;
  session::Reduction reduction_;
};

struct Schedule {
  int turns;
  int rounds;  ///< Rounds of a turn; the first tenth warms up.
};

/// All processes go through the same turns; `play(way, case, round, warm)` is one round of it.
void each_round(const Schedule& schedule, int ways, const auto& play) {
  std::vector<std::uint32_t> played(static_cast<std::size_t>(ways), 0);
  for (int turn = 0; turn < schedule.turns; ++turn) {
    for (const bool spins : {true, false}) {
      for (int way = 0; way < ways; ++way) {
        for (int i = 0; i < schedule.rounds; ++i)
          play(way, spins, ++played[static_cast<std::size_t>(way)], i >= schedule.rounds / 10);
      }
    }
  }
}

void measure(bool quick) {
  const Schedule schedule{.turns = quick ? 3 : 10, .rounds = quick ? 200 : 1000};
  auto manifest = one_tensor();
  auto session = session::Session::create({.ranks = runners, .bytes = manifest.place_tensors(), .tensors = 1},
                                          runners, 1);
  auto& shared = *new (bench::share<Shared>()) Shared{};
  auto& bare = *new (bench::share<Shared>()) Shared{};
  const bool host_has_a_core = std::thread::hardware_concurrency() > runners;

  Ours ours(shared, session);
  Futex futex(bare);
  WholeAttempt whole(session);
  Way* const ways[] = {&ours, &futex, &whole};

  std::vector<pid_t> processes;
  for (int rank = 0; rank < runners; ++rank) {
    processes.push_back(bench::fork_worker([&] {
      std::optional<bench::Pin> pin;
      each_round(schedule, std::size(ways), [&](int way, bool spins, std::uint32_t round, bool) {
        // Pinned: two spinning processes on one core would measure the scheduler.
        if (spins && !pin) pin.emplace(rank, runners);
        if (!spins) pin.reset();
        ways[way]->answer(rank, round, spins);
      });
    }));
  }
  processes.push_back(bench::fork_worker([&] {
    std::vector<double> us[std::size(ways)][2];
    each_round(schedule, std::size(ways), [&](int way, bool spins, std::uint32_t round, bool warm) {
      const auto begin = base::now_ns();
      ways[way]->call(round, spins && host_has_a_core);
      if (warm) us[way][spins].push_back(double(base::now_ns() - begin) / 1e3);
    });
    for (const bool spins : {true, false}) {
      for (std::size_t way = 0; way < std::size(ways); ++way)
        bench::emit(ways[way]->name(), spins ? "spinning" : "parked", "round_trip",
                    bench::median(us[way][spins]), "us");
    }
  }));
  bench::wait_workers(processes);
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = bench::parse_quick(argc, argv);
  return bench::exit_code_of([&] { measure(quick); });
}
