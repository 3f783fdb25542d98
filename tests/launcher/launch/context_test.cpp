// Tests of SpawnContext: waiting with a time limit, and what happens to the ranks when the context is
// destroyed.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "functions.hpp"
#include "launched.hpp"

namespace accelmgr::launch::test {
namespace {

class Context : public Launched {};

TEST_F(Context, JoinIsFalseWhileSomeRunAndTrueWhenAllHaveEnded) {
  const Line line;
  auto context = spawn(until_told(line), {}, not_joined(options(2)));
  line.hear_pidfds(2);
  EXPECT_FALSE(context.join(0));
  EXPECT_EQ(context.results(), (std::vector<Value>{nullptr, nullptr}));
  line.order();
  EXPECT_FALSE(context.join(0.02)) << "one of them still runs";
  line.order();
  EXPECT_TRUE(context.join());
  EXPECT_TRUE(context.join(0)) << "joined again";
  EXPECT_EQ(context.results(), (std::vector<Value>{0, 1}));
}

TEST_F(Context, EachProcessIsSeenToEndForItself) {
  const std::vector<Line> lines(2);
  auto context = spawn(
      [&](int rank, const Value&) {
        lines[static_cast<std::size_t>(rank)].await_order();
        return rank == 0 ? Value("done") : obey("throw");
      },
      {}, not_joined(options(2)));
  EXPECT_FALSE(context.wait(0, 0));
  for (const auto& process : context.processes()) EXPECT_FALSE(process.exit_code);
  lines[0].order();
  EXPECT_TRUE(context.wait(0, 20));
  EXPECT_EQ(context.processes()[0].exit_code, 0);
  EXPECT_EQ(context.results()[0], "done");
  EXPECT_FALSE(context.processes()[1].exit_code);
  lines[1].order();
  EXPECT_TRUE(ipc::wait_ended(context.processes()[1].pidfd, soon()));
  const auto failed = context.processes()[1];
  EXPECT_EQ(failed.exit_code, 17) << "the pidfd tells of the end";
  EXPECT_EQ(failed.failure.value().what, "as ordered");
  EXPECT_EQ(failure_of([&] { context.join(); }).rank(), 1);
  EXPECT_EQ(context.processes()[1].exit_code, 17);
}

TEST_F(Context, IsJoinedByWhoSpawnedIt) {
  const Line line;
  auto context = spawn(until_told(line), {}, not_joined(options(2)));
  const auto pidfds = line.hear_pidfds(2);
  EXPECT_EQ(end_of(fork_child([&] {
              return says(message_of<UsageError>([&] { context.join(0); }),
                          {"must be joined by the process that called spawn(), not by one forked from it"})
                         ? 0
                         : 1;
            })),
            "exit code 0");
  EXPECT_FALSE(context.join(0)) << "it is still of use";
}

TEST_F(Context, DaemonsAreEndedWithTheContextAndWhenAnotherIsAssignedToIt) {
  const Line line;
  std::vector<base::UniqueFd> first, second;
  {
    auto context = spawn(until_told(line), {}, not_joined(options(2)));
    first = line.hear_pidfds(2);
    context = spawn(until_told(line), {}, not_joined(options(2)));
    expect_ended(first);
    second = line.hear_pidfds(2);
  }
  expect_ended(second);
}

/// A program whose ranks still run when it returns from main(), which it does when it hears from `go`. It
/// keeps the context of daemons to the end; otherwise it lets go of the context at once.
ipc::Child program(const Line& line, const Line& go, bool daemon) {
  return fork_child([&line, &go, daemon] {
    auto chosen = options(2);
    chosen.join = false;
    chosen.daemon = daemon;
    // Never destroyed: the context still exists when the program exits.
    static auto* const kept = new std::optional<SpawnContext>;
    if (daemon)
      kept->emplace(spawn(until_told(line), {}, chosen));
    else
      spawn(until_told(line), {}, chosen);
    go.await_order();
    line.tell("let go");
    std::exit(0);
    return 0;
  });
}

TEST_F(Context, TheProgramWaitsForThoseThatAreNoDaemonsBeforeItEnds) {
  const Line line, go;
  const auto client = program(line, go, false);
  line.hear_pidfds(2);
  go.order();
  EXPECT_EQ(line.hear().bytes, "let go");
  EXPECT_FALSE(ipc::wait_ended(client.pidfd.get(), base::Deadline::in_seconds(0.05)));
  line.order(2);
  EXPECT_EQ(end_of(client), "exit code 0");
}

TEST_F(Context, DaemonsAreEndedWithTheProgram) {
  const Line line, go;
  const auto client = program(line, go, true);
  const auto ranks = line.hear_pidfds(2);
  go.order();
  EXPECT_EQ(end_of(client), "exit code 0");
  expect_all_end(ranks);
}

}  // namespace
}  // namespace accelmgr::launch::test
