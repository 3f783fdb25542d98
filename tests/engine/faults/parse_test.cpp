#include <gtest/gtest.h>

#include "accelmgr/errors.hpp"
#include "engine/faults/plan.hpp"
#include "message_of.hpp"

namespace accelmgr::faults {
namespace {

using base::FaultPhase;

TEST(FaultText, MeansTheFirstTimeInAnyStepOfTheFirstProcessByDefault) {
  const auto fault = parse("rank=any phase=chunk fault=stop");
  EXPECT_EQ(fault.step, std::nullopt);
  EXPECT_EQ(fault.occurrence, 1U);
  EXPECT_EQ(fault.probability, std::nullopt);
  EXPECT_EQ(fault.generation, 1U);
  EXPECT_EQ(parse("rank=manager phase=data fault=stop").generation, 0U);
}

TEST(FaultText, IsReadInAnyOrderAndSpacing) {
  const auto fault = parse(
      "  seed=18446744073709551615 fault=hang\tphase=any  probability=0.25 generation=any"
      " step=any rank=manager ");
  EXPECT_EQ(fault.rank, manager_rank);
  EXPECT_EQ(fault.step, std::nullopt);
  EXPECT_EQ(fault.phase, std::nullopt);
  EXPECT_EQ(fault.generation, std::nullopt);
  EXPECT_EQ(fault.probability, 0.25);
  EXPECT_EQ(fault.seed, 18446744073709551615U);
  const auto other = parse("rank=any phase=data occurrence=7 generation=2 fault=kill");
  EXPECT_EQ(other.rank, std::nullopt);
  EXPECT_EQ(other.occurrence, 7U);
  EXPECT_EQ(other.generation, 2U);
}

TEST(FaultText, KnowsEveryPhaseByItsName) {
  for (const auto phase : phases)
    EXPECT_EQ(parse("rank=0 fault=kill phase=" + std::string(name_of(phase))).phase, phase);
  EXPECT_EQ(name_of(FaultPhase::update_saved), "update_saved");
  EXPECT_EQ(name_of(FaultPhase::published), "published");
}

TEST(FaultText, KnowsEveryFault) {
  const auto of = [](const std::string& text) { return parse("rank=0 phase=forward fault=" + text); };
  EXPECT_EQ(of("kill").action, Action::kill);
  EXPECT_EQ(of("stop").action, Action::stop);
  EXPECT_EQ(of("hang").action, Action::hang);
  EXPECT_EQ(of("nan").action, Action::nan);
  EXPECT_EQ(of("exit:255").action, Action::exit);
  EXPECT_EQ(of("exit:255").exit_code, 255);
  EXPECT_EQ(of("exception").action, Action::exception);
  EXPECT_EQ(of("exception").message, "injected fault");
  EXPECT_EQ(of("exception:out:of:paper").message, "out:of:paper");
  EXPECT_EQ(of("slow:1500").action, Action::slow);
  EXPECT_EQ(of("slow:1500").delay, std::chrono::milliseconds(1500));
}

TEST(FaultText, TakesAnyPhaseOfNanForForward) {
  EXPECT_EQ(parse("rank=0 phase=any fault=nan").phase, FaultPhase::forward);
}

TEST(FaultText, ThatCannotStrikeOrBeReadIsRefused) {
  for (const auto* text : {"",
                           "rank=1 kill",
                           "rank=1 stpe=3 phase=data fault=kill",
                           "rank=1 rank=2 phase=data fault=kill",
                           "rank=1 phase=data",
                           "rank=24 phase=data fault=kill",
                           "rank=manger phase=data fault=kill",
                           "rank=1 step=0 phase=data fault=kill",
                           "rank=1 step=1 phase=init fault=kill",
                           "rank=1 phase=froward fault=kill",
                           "rank=1 phase=chunk occurrence=0 fault=kill",
                           "rank=manager phase=data generation=x fault=kill",
                           "rank=1 phase=any probability=0 seed=1 fault=kill",
                           "rank=1 phase=any probability=0.5 seed=-1 fault=kill",
                           "rank=1 phase=any probability=0.5 fault=kill",
                           "rank=1 phase=data seed=5 fault=kill",
                           "rank=1 phase=data occurrence=2 probability=0.5 seed=5 fault=kill",
                           "rank=1 phase=data fault=slwo:5",
                           "rank=1 phase=data fault=kill:5",
                           "rank=1 phase=data fault=exit:256",
                           "rank=1 phase=data fault=slow",
                           "rank=1 phase=vote fault=nan"}) {
    const auto message = test::message_of<ConfigError>([&] { parse(text); });
    EXPECT_TRUE(message.starts_with("faults: '" + std::string(text) + "': ")) << message;
  }
}

}  // namespace
}  // namespace accelmgr::faults
