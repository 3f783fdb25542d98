#include <gtest/gtest.h>

#include <set>

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

TEST(FaultText, KnowsEveryPhaseByAName) {
  std::set<std::string_view> names;
  for (const auto phase : phases) {
    names.insert(name_of(phase));
    const auto fault = parse("rank=0 fault=kill phase=" + std::string(name_of(phase)));
    EXPECT_EQ(fault.phase, phase);
  }
  EXPECT_EQ(names.size(), phases.size());
  EXPECT_TRUE(names.contains("init"));
  EXPECT_TRUE(names.contains("checkpoint"));
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

struct Refused {
  std::string name, text, what;
};

std::ostream& operator<<(std::ostream& out, const Refused& refused) { return out << refused.text; }

class FaultTextRefused : public testing::TestWithParam<Refused> {};

TEST_P(FaultTextRefused, WithTheTextTheKeyAndWhatIsAllowed) {
  const auto& [name, text, what] = GetParam();
  const auto message = test::message_of<ConfigError>([&text = text] { parse(text); });
  EXPECT_EQ(message, "faults: '" + text + "': " + what);
  try {
    parse(text);
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.key(), "faults");
  }
}

constexpr auto keys_text = "rank, step, phase, occurrence, generation, probability, seed, fault";
constexpr auto phases_text =
    "init or load_parameters or data or forward or backward or gradient_capture or vote or voted or "
    "undo_saved or in_flight or reduced or chunk or update_saved or update_in_flight or updated or publish "
    "or published or close or checkpoint or any";
constexpr auto faults_text = "kill, stop, exit:CODE, exception[:TEXT], hang, nan or slow:MILLISECONDS";

const Refused refused[] = {
    {"Empty", "", "rank is missing; a fault has rank, phase and fault"},
    {"NoValue", "rank=1 kill",
     std::string("'kill' has no value; it must be KEY=VALUE, where KEY is ") + keys_text},
    {"UnknownKey", "rank=1 stpe=3",
     std::string("unknown key 'stpe'; the keys are ") + keys_text + "; did you mean 'step'?"},
    {"Twice", "rank=1 rank=2", "rank is given twice"},
    {"RankTooLarge", "rank=24 phase=data fault=kill",
     "rank is '24'; it must be a number from 0 to 23, manager or any"},
    {"RankMisspelt", "rank=manger phase=data fault=kill",
     "rank is 'manger'; it must be a number from 0 to 23, manager or any; did you mean 'manager'?"},
    {"StepZero", "rank=1 step=0 phase=data fault=kill", "step is '0'; it must be a number from 1, or any"},
    {"StepOfInit", "rank=1 step=1 phase=init fault=kill",
     "phase init comes before every step; step must be any"},
    {"PhaseMisspelt", "rank=1 phase=froward fault=kill",
     std::string("phase is 'froward'; it must be ") + phases_text + "; did you mean 'forward'?"},
    {"OccurrenceZero", "rank=1 phase=chunk occurrence=0 fault=kill",
     "occurrence is '0'; it must be a number from 1"},
    {"GenerationOfTheManager", "rank=manager phase=data generation=x fault=kill",
     "generation is 'x'; it must be a number from 0, or any"},
    {"ProbabilityZero", "rank=1 phase=any probability=0 seed=1 fault=kill",
     "probability is '0'; it must be a number above 0, of at most 1"},
    {"NegativeSeed", "rank=1 phase=any probability=0.5 seed=-1 fault=kill",
     "seed is '-1'; it must be a whole number of at least 0"},
    {"ProbabilityWithoutSeed", "rank=1 phase=any probability=0.5 fault=kill",
     "probability needs a seed: the draws depend on it"},
    {"SeedWithoutProbability", "rank=1 phase=data seed=5 fault=kill",
     "seed needs a probability: nothing else is drawn"},
    {"CountAndChance", "rank=1 phase=data occurrence=2 probability=0.5 seed=5 fault=kill",
     "occurrence and probability exclude each other: it strikes by count or by chance"},
    {"FaultMisspelt", "rank=1 phase=data fault=slwo:5",
     std::string("fault is 'slwo:5'; it must be ") + faults_text + "; did you mean 'slow'?"},
    {"ExitCodeTooLarge", "rank=1 phase=data fault=exit:256",
     "fault is 'exit:256'; CODE of exit:CODE must be a number from 0 to 255"},
    {"SlowWithoutTime", "rank=1 phase=data fault=slow",
     "fault is 'slow'; MILLISECONDS of slow:MILLISECONDS must be a number from 1 to 3600000"},
    {"NanOfNothing", "rank=1 phase=vote fault=nan",
     "phase is 'vote'; for fault=nan it must be forward or any"},
};

INSTANTIATE_TEST_SUITE_P(All, FaultTextRefused, testing::ValuesIn(refused),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace accelmgr::faults
