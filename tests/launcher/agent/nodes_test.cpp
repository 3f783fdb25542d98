#include "launcher/agent/nodes.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelmgr/communicator.hpp"
#include "accelmgr/errors.hpp"
#include "message_of.hpp"

namespace accelmgr::agent {
namespace {

using test::message_of;
using testing::AllOf;
using testing::HasSubstr;
using Kind = Nodes::Outcome::Kind;

class StoreInMemory : public collective::Store {
 public:
  void set(const std::string& key, const std::string& value) override { values[key] = value; }
  std::string get(const std::string& key, base::Deadline) override {
    if (!values.contains(key)) throw CollectiveError(key, CollectiveError::Cause::timeout, {});
    return values[key];
  }
  bool has(const std::string& key) override { return values.contains(key); }
  std::int64_t add(const std::string& key, std::int64_t amount) override {
    const auto sum = (values.contains(key) ? std::stoll(values[key]) : 0) + amount;
    values[key] = std::to_string(sum);
    return sum;
  }

  std::map<std::string, std::string> values;
};

std::int64_t now_ns = 0;
void pass_time(double seconds) { now_ns += static_cast<std::int64_t>(seconds * 1e9); }

Node node(int nnodes, int nprocs, const std::string& hostname) {
  return {.nnodes = nnodes,
          .min_nodes = nnodes,
          .nprocs = nprocs,
          .max_restarts = 1,
          .backend = "gloo",
          .hostname = hostname,
          .pid = 7};
}

Failure failure_of_rank(int rank) {
  return {.rank = rank, .pid = 10 + rank, .exit_code = 3, .exit = "exit code 3", .hostname = "x"};
}

class TwoNodes : public testing::Test {
 protected:
  Nodes make(int node_rank, Node self) {
    self.node_rank = node_rank;
    return Nodes(store, self, [] { return now_ns; });
  }
  void meet() {
    a.meet();
    b.meet();
    ASSERT_TRUE(a.meet());
    ASSERT_TRUE(b.meet());
  }

  StoreInMemory store;
  Nodes a = make(0, node(2, 2, "alpha"));
  Nodes b = make(1, node(2, 3, "beta"));
};

TEST_F(TwoNodes, MeetWhenBothAreThereAndSeeTheSameWorld) {
  EXPECT_FALSE(a.meet());
  EXPECT_FALSE(b.meet());
  const auto at_a = a.meet(), at_b = b.meet();
  ASSERT_TRUE(at_a && at_b);
  EXPECT_EQ(at_a->size(), 5);
  EXPECT_EQ(at_b->rank_offset(0), 0);
  EXPECT_EQ(at_b->rank_offset(1), 2);
  EXPECT_EQ(at_a->nodes, at_b->nodes);
  EXPECT_EQ(at_a->run_id, at_b->run_id);
}

TEST_F(TwoNodes, AnotherNumberOfNodesIsAContradictionThatBothTell) {
  auto wrong = make(2, node(3, 1, "gamma"));
  a.meet();
  for (const auto& message :
       {message_of<ConfigError>([&] { wrong.meet(); }), message_of<ConfigError>([&] { a.meet(); })})
    EXPECT_THAT(message, AllOf(HasSubstr("node 0 (alpha"), HasSubstr("--nnodes 2"),
                               HasSubstr("node 2 (gamma"), HasSubstr("--nnodes 3")));
}

TEST_F(TwoNodes, ContradictionsAreSeenByNodeZeroToo) {
  auto other = node(2, 1, "beta");
  other.backend = "nccl";
  auto wrong = make(1, other);
  wrong.meet();  // Sees no contradiction: node 0 is not there yet.
  EXPECT_THAT(message_of<ConfigError>([&] { a.meet(); }),
              AllOf(HasSubstr("backend gloo"), HasSubstr("backend nccl")));
}

TEST_F(TwoNodes, APlaceThatIsTakenNamesWhoHasIt) {
  b.meet();
  auto again = make(1, node(2, 1, "gamma"));
  EXPECT_THAT(message_of<ConfigError>([&] { again.meet(); }),
              AllOf(HasSubstr("--node-rank 1"), HasSubstr("taken on beta")));
  again.leave(base::Deadline::at_ns(0));
  EXPECT_FALSE(store.has("accelmgr/spawn/left/1")) << "the place is still the other's";
}

TEST_F(TwoNodes, WhoDidNotComeIsNamedAndWhoDidIsToldSo) {
  auto third = make(2, node(3, 1, "gamma"));
  auto first = make(0, node(3, 1, "alpha"));
  first.meet();
  third.meet();
  const std::string what = first.missing("alpha:29500", 60).what();
  EXPECT_THAT(what, AllOf(HasSubstr("alpha:29500"), HasSubstr("60 s"), HasSubstr("node 1 missing"),
                          HasSubstr("node 2 (gamma")));
  EXPECT_EQ(message_of<SessionError>([&] { third.meet(); }), what);
}

TEST_F(TwoNodes, TheFirstFailureOfAllIsTheOneThatBothSee) {
  meet();
  EXPECT_EQ(a.look().kind, Kind::running);
  b.report_failed(failure_of_rank(3));
  a.report_failed(failure_of_rank(0));
  for (auto* nodes : {&a, &b}) {
    const auto outcome = nodes->look();
    EXPECT_EQ(outcome.kind, Kind::failed);
    EXPECT_EQ(outcome.failure, failure_of_rank(3));
  }
}

TEST_F(TwoNodes, AreDoneWhenAllAre) {
  meet();
  b.report_done();
  EXPECT_EQ(a.look().kind, Kind::running);
  EXPECT_EQ(b.look().kind, Kind::running);
  a.report_done();
  EXPECT_EQ(a.look().kind, Kind::done);
  EXPECT_EQ(b.look().kind, Kind::done);
}

TEST_F(TwoNodes, AStopIsForAllAndTheFirstCounts) {
  meet();
  b.stop({.signal = 2, .what = "interrupted", .node_rank = 1});
  a.stop({.signal = 15, .node_rank = 0});
  for (auto* nodes : {&a, &b}) {
    const auto outcome = nodes->look();
    EXPECT_EQ(outcome.kind, Kind::stopped);
    EXPECT_EQ(outcome.failure.signal, 2);
  }
}

TEST_F(TwoNodes, ANodeWithoutASignOfLifeIsLost) {
  meet();
  for (double waited = 0; waited < Nodes::lost_after_s; waited += 1) {
    EXPECT_EQ(a.look().kind, Kind::running) << waited;
    pass_time(1);
  }
  a.look();
  const auto outcome = a.look();
  EXPECT_EQ(outcome.kind, Kind::stopped);
  EXPECT_THAT(outcome.failure.what, AllOf(HasSubstr("no heartbeat"), HasSubstr("node 1 (beta")));
}

TEST_F(TwoNodes, ANodeThatLooksIsNotLost) {
  meet();
  for (double waited = 0; waited < 3 * Nodes::lost_after_s; waited += 1) {
    EXPECT_EQ(a.look().kind, Kind::running);
    EXPECT_EQ(b.look().kind, Kind::running);
    pass_time(1);
  }
}

TEST_F(TwoNodes, WhoWasStoppedItselfBlamesNobody) {
  meet();
  a.look();
  pass_time(10 * Nodes::lost_after_s);
  EXPECT_EQ(a.look().kind, Kind::running);
}

TEST_F(TwoNodes, StartAgainWhenNoProcessIsLeftOnAnyNode) {
  meet();
  a.report_failed(failure_of_rank(0));
  a.report_ended({.later = {failure_of_rank(1)}, .ended = 0});
  EXPECT_FALSE(a.all_ended());
  b.report_ended({.later = {failure_of_rank(2)}, .ended = 2});
  const auto all = a.all_ended();
  ASSERT_TRUE(all);
  EXPECT_EQ(all->ended, 2);
  EXPECT_EQ(all->later.size(), 2U);
  EXPECT_TRUE(b.all_ended());

  int emptied = 0;
  const auto empty = [&] { ++emptied; };
  EXPECT_FALSE(b.begin(1, empty)) << "node 0 has not";
  EXPECT_TRUE(a.begin(1, empty));
  EXPECT_TRUE(b.begin(1, empty));
  EXPECT_EQ(emptied, 1);
  EXPECT_EQ(a.look().kind, Kind::running) << "the failure was that of the attempt before";
  EXPECT_EQ(b.look().kind, Kind::running);
}

TEST_F(TwoNodes, NodeZeroLeavesLast) {
  meet();
  b.leave(base::Deadline::at_ns(0));
  a.leave(base::Deadline::in_seconds(30));  // Returns at once.
  EXPECT_TRUE(store.has("accelmgr/spawn/left/0"));
}

/// --nnodes 2:3 --max-restarts 2.
class ElasticNodes : public testing::Test {
 protected:
  Nodes make(int node_rank, const std::string& host, int max_restarts = 2) {
    auto self = node(3, 1, host);
    self.min_nodes = 2;
    self.node_rank = node_rank;
    self.max_restarts = max_restarts;
    return Nodes(store, self, [] { return now_ns; });
  }
  /// Agents that live call this; of the others no heartbeat comes.
  static void live(std::initializer_list<Nodes*> nodes, double seconds) {
    for (double passed = 0; passed <= seconds; passed += 1) {
      for (auto* n : nodes) n->look();
      pass_time(1);
    }
  }
  static std::vector<std::string> hosts(const std::optional<World>& world) {
    std::vector<std::string> names;
    if (world)
      for (const auto& n : world->nodes) names.push_back(n.hostname);
    return names;
  }
  void meet() {
    for (auto* n : {&a, &b, &c}) n->meet();
    for (auto* n : {&a, &b, &c}) ASSERT_TRUE(n->meet());
  }
  static void end(std::initializer_list<Nodes*> nodes) {
    for (auto* n : nodes) n->report_ended({});
  }

  StoreInMemory store;
  Nodes a = make(0, "alpha");
  Nodes b = make(1, "beta");
  Nodes c = make(2, "gamma");
  const std::function<void()> nothing = [] {};
};

TEST_F(ElasticNodes, AreInTheOrderOfTheirNodeRanksWhoeverCameFirst) {
  c.meet();
  b.meet();
  EXPECT_THAT(hosts(a.meet()), testing::ElementsAre("alpha", "beta", "gamma"));
  EXPECT_EQ(c.meet()->node_rank, 2);
}

TEST_F(ElasticNodes, AreWaitedForUntilTheTimeoutAndThenEnoughSuffice) {
  c.meet();
  EXPECT_FALSE(a.meet());
  EXPECT_THAT(hosts(a.meet(false)), testing::ElementsAre("alpha", "gamma"));
  EXPECT_EQ(c.meet()->node_rank, 1);
}

TEST_F(ElasticNodes, WithTooFewEndWithAnErrorThatSaysSo) {
  EXPECT_FALSE(a.meet(false));
  EXPECT_THAT(a.missing("alpha:29500", 60).what(), AllOf(HasSubstr("1 of at least 2 nodes (--nnodes 2:3)"),
                                                         HasSubstr("60 s"), HasSubstr("alpha")));
  EXPECT_THAT(message_of<SessionError>([&] { b.meet(); }), HasSubstr("1 of at least 2 nodes"));
}

TEST_F(ElasticNodes, GoOnWithoutALostOne) {
  meet();
  live({&a, &b}, Nodes::lost_after_s + 1);
  for (auto* n : {&a, &b}) {
    const auto outcome = n->look();
    EXPECT_EQ(outcome.kind, Kind::changed);
    EXPECT_THAT(outcome.failure.what, AllOf(HasSubstr("no heartbeat"), HasSubstr("node 2 (gamma")));
  }
  end({&a});
  EXPECT_FALSE(a.all_ended()) << "b has processes";
  end({&b});
  EXPECT_TRUE(a.all_ended());
  EXPECT_TRUE(b.all_ended());
  EXPECT_FALSE(b.begin(1, nothing));
  EXPECT_THAT(hosts(a.begin(1, nothing)), testing::ElementsAre("alpha", "beta"));
  const auto world = b.begin(1, nothing);
  ASSERT_TRUE(world);
  EXPECT_EQ(world->attempt, 1);
  EXPECT_EQ(a.look().kind, Kind::running);
  EXPECT_EQ(b.look().kind, Kind::running);
}

TEST_F(ElasticNodes, AFailureThatALossBringsIsOneRestart) {
  meet();
  b.report_failed(failure_of_rank(1));
  EXPECT_EQ(a.look().kind, Kind::failed);
  end({&a, &b});
  for (double waited = 0; waited < Nodes::lost_after_s; waited += 1) {
    EXPECT_FALSE(a.all_ended()) << waited;
    EXPECT_FALSE(b.all_ended()) << waited;
    pass_time(1);
  }
  pass_time(1);
  EXPECT_TRUE(a.all_ended());
  EXPECT_TRUE(b.all_ended());
  EXPECT_THAT(hosts(a.begin(1, nothing)), testing::ElementsAre("alpha", "beta"));
}

TEST_F(ElasticNodes, TakeOneThatComesLater) {
  c.meet();
  ASSERT_TRUE(a.meet(false));
  ASSERT_TRUE(c.meet());
  EXPECT_FALSE(b.meet());
  for (auto* n : {&a, &c}) n->look();
  for (auto* n : {&a, &c}) EXPECT_THAT(n->look().failure.what, HasSubstr("node 1 (beta, pid 7) came"));
  end({&a, &c});
  ASSERT_TRUE(a.all_ended());
  EXPECT_THAT(hosts(a.begin(1, nothing)), testing::ElementsAre("alpha", "beta", "gamma"));
  const auto world = b.meet();
  ASSERT_TRUE(world);
  EXPECT_EQ(world->attempt, 1);
  EXPECT_EQ(world->node_rank, 1);
  EXPECT_EQ(c.begin(1, nothing)->node_rank, 2);
}

TEST_F(ElasticNodes, LeaveOneOutForWhomThereIsNoPlaceOrNoRestart) {
  meet();
  auto fourth = make(1, "delta");
  EXPECT_FALSE(fourth.meet());
  live({&a, &b, &c}, 2);
  EXPECT_EQ(a.look().kind, Kind::running);
  EXPECT_THAT(fourth.missing("alpha:29500", 60).what(), HasSubstr("has not taken this node within 60 s"));

  StoreInMemory another;
  std::swap(store.values, another.values);
  auto first = make(0, "alpha", 0), second = make(1, "beta", 0), third = make(2, "gamma", 0);
  second.meet();
  ASSERT_TRUE(first.meet(false));
  EXPECT_FALSE(third.meet());
  first.look();
  EXPECT_EQ(first.look().kind, Kind::running);
}

TEST_F(ElasticNodes, TheOneInWhosePlaceAnotherCameIsToldSo) {
  meet();
  live({&a, &b}, Nodes::lost_after_s + 1);  // c is stopped for so long.
  const auto outcome = c.look();
  EXPECT_EQ(outcome.kind, Kind::stopped);
  EXPECT_THAT(outcome.failure.what, HasSubstr("the others go on without this node"));
}

TEST_F(ElasticNodes, ANodeThatIsDoneIsNotLost) {
  meet();
  c.report_done();
  live({&a, &b}, 2 * Nodes::lost_after_s);
  EXPECT_EQ(a.look().kind, Kind::running);
  a.report_done();
  b.report_done();
  EXPECT_EQ(a.look().kind, Kind::done);
}

TEST_F(ElasticNodes, OneThatLeavesWhileTooFewAreThereDoesNotCount) {
  meet();
  b.report_failed(failure_of_rank(1));
  end({&a, &b, &c});
  ASSERT_TRUE(a.all_ended());
  b.leave(base::Deadline::at_ns(0));
  c.leave(base::Deadline::at_ns(0));
  EXPECT_FALSE(a.begin(1, nothing));
  a.give_up(a.missing("alpha:29500", 60));
  EXPECT_THAT(a.stopped()->what, HasSubstr("1 of at least 2 nodes"));
}

TEST_F(ElasticNodes, OneThatContradictsThemDoesNotStopThem) {
  meet();
  auto wrong = make(1, "delta", 7);
  EXPECT_THAT(message_of<ConfigError>([&] { wrong.meet(); }), HasSubstr("--max-restarts 7"));
  auto self = node(2, 1, "epsilon");
  self.node_rank = 1;
  EXPECT_THAT(message_of<ConfigError>([&] { Nodes(store, self, [] { return now_ns; }).meet(); }),
              AllOf(HasSubstr("--nnodes 2:3"), HasSubstr("--nnodes 2")));
  live({&a, &b, &c}, 2);
  EXPECT_EQ(b.look().kind, Kind::running);
}

TEST_F(ElasticNodes, OneThatComesAtTheEndIsToldThatItIsOver) {
  meet();
  auto fourth = make(1, "delta");
  fourth.meet();
  for (auto* n : {&a, &b, &c}) n->report_done();
  EXPECT_EQ(a.look().kind, Kind::done);
  EXPECT_THAT(message_of<SessionError>([&] { fourth.meet(); }),
              HasSubstr("ended before this node could join"));
}

TEST(OneNode, IsAWorldOfItsOwn) {
  StoreInMemory store;
  Nodes alone(store, node(1, 4, "alpha"));
  const auto world = alone.meet();
  ASSERT_TRUE(world);
  EXPECT_EQ(world->size(), 4);
  alone.report_done();
  EXPECT_EQ(alone.look().kind, Kind::done);
  alone.leave(base::Deadline::at_ns(0));
}

}  // namespace
}  // namespace accelmgr::agent
