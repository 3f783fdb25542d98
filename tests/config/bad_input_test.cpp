// Checks that wrong values and keys of every source are refused, and that the error says what is wrong,
// where, and what would be right.
#include <ostream>

#include "config/support.hpp"

namespace accelmgr::config {
namespace {

struct Case {
  std::string name;
  std::string yaml;
  std::string key;
  std::vector<std::string> says;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class BadFile : public ::testing::TestWithParam<Case> {};

TEST_P(BadFile, IsRefusedWithPlaceAndRemedy) {
  const auto& expected = GetParam();
  const auto refused = refusal([&] { load_text(expected.yaml); });
  EXPECT_TRUE(says(refused, expected.says));
  EXPECT_EQ(refused.key, expected.key);
}

INSTANTIATE_TEST_SUITE_P(
    Config, BadFile,
    ::testing::Values(
        Case{"MistypedKey",
             "prefetch: 3\nnproc: 2\n",
             "nproc",
             {"run.yaml:2: ", "'nproc'", "did you mean 'nprocs'?"}},
        Case{"MistypedNestedKey",
             "optimizer:\n  kind: sgd\n  learning-rate: 1\n",
             "optimizer.learning-rate",
             {"run.yaml:3: ", "did you mean 'optimizer.learning_rate'?"}},
        Case{"MistypedSection",
             "optimiser:\n  kind: sgd\n",
             "optimiser",
             {"run.yaml:1: ", "did you mean 'optimizer'?"}},
        Case{"MistypedDottedSection",
             "optimiser.kind: sgd\n",
             "optimiser.kind",
             {"did you mean 'optimizer.kind'?"}},
        Case{"KeyOfAnotherSection",
             "learning_rate: 1\n",
             "learning_rate",
             {"did you mean 'optimizer.learning_rate'?"}},
        Case{"KeyInCapitals", "MODEL.Kind: gpt\n", "MODEL.Kind", {"did you mean 'model.kind'?"}},
        Case{"KeyNearNone",
             "optimizer:\n  lr: 1\n",
             "optimizer.lr",
             {"run.yaml:2: ", "the keys of 'optimizer' are kind, learning_rate"}},
        Case{"NumberThatIsText",
             "nprocs: two\n",
             "nprocs",
             {"run.yaml:1: nprocs is 'two'", "whole number from 1 to 24"}},
        Case{"NumberInQuotes",
             "nprocs: \"2\"\n",
             "nprocs",
             {"nprocs is the string '2'", "whole number from 1 to 24"}},
        Case{"FractionForAWholeNumber", "nprocs: 2.0\n", "nprocs", {"'2.0'", "whole number"}},
        Case{"ListForANumber",
             "nprocs: [1, 2]\n",
             "nprocs",
             {"nprocs is a list (1, 2)", "whole number from 1 to 24"}},
        Case{"MapForANumber",
             "nprocs:\n  a: 1\n",
             "nprocs",
             {"run.yaml:1: ", "nprocs must be a single value"}},
        Case{"NoValue", "nprocs:\n", "nprocs", {"run.yaml:1: nprocs has no value"}},
        Case{"NoValueInAList", "data.files:\n  - a\n  -\n", "data.files", {"data.files has no value"}},
        Case{"ZeroRunners", "\n\nnprocs: 0\n", "nprocs", {"run.yaml:3: nprocs is '0'", "from 1 to 24"}},
        Case{"TooManyRunners", "nprocs: 25\n", "nprocs", {"nprocs is '25'", "from 1 to 24"}},
        Case{"BeyondSixtyFourBits", "train.steps: 99999999999999999999\n", "train.steps", {"of at least 1"}},
        Case{"NegativeSeed", "seed_base: -1\n", "seed_base", {"'-1'", "whole number of at least 0"}},
        Case{"InfiniteNumber",
             "optimizer.learning_rate: inf\n",
             "optimizer.learning_rate",
             {"'inf'", "of at least 0"}},
        Case{"UndefinedNumber", "optimizer.learning_rate: nan\n", "optimizer.learning_rate", {"'nan'"}},
        Case{"AtAnOpenBound", "model.gpt.dropout: 1\n", "model.gpt.dropout", {"of at least 0 and below 1"}},
        Case{"TruthOfAnotherLanguage", "deterministic: yes\n", "deterministic", {"'yes'", "true or false"}},
        Case{"UnknownChoice",
             "optimizer.kind: adamW\n",
             "optimizer.kind",
             {"'adamW'", "sgd or adam or adamw", "did you mean 'adamw'?"}},
        Case{"Lbfgs",
             "optimizer:\n  kind: lbfgs\n",
             "optimizer.kind",
             {"run.yaml:2: ", "closure several times per update", "a step here is one gradient"}},
        Case{"RepeatedKey",
             "nprocs: 1\nprefetch: 1\nnprocs: 2\n",
             "nprocs",
             {"run.yaml:3: nprocs is set a second time; the first time is in line 1"}},
        Case{"RepeatedSection", "data:\n  seed: 1\ndata:\n  epochs: 1\n", "data", {"run.yaml:3: ", "line 1"}},
        Case{"KeyBothNestedAndDotted",
             "data.seed: 1\ndata:\n  seed: 2\n",
             "data.seed",
             {"run.yaml:3: ", "line 1"}},
        Case{"ValueForASection", "model: gpt\n", "model", {"run.yaml:1: model is a section"}},
        Case{"ValueForAMap", "model.options: x\n", "model.options", {"model.options is a section"}},
        Case{"MapWithinAMap",
             "model.options:\n  a: {b: 1}\n",
             "model.options.a",
             {"run.yaml:2: ", "single value"}},
        Case{"MapThatContainsItself", "model.options: &m\n  a: *m\n", "model.options.a", {"single value"}},
        Case{"EntryWithoutAName",
             "model.options:\n  \"\": 1\n",
             "model.options.",
             {"unknown key 'model.options.'"}},
        Case{"KeyThatIsAList", "? [a, b]\n: 1\n", "", {"run.yaml:1: a key must be a name"}},
        Case{"NoMap", "- nprocs\n", "", {"run.yaml:1: a configuration must be a map"}},
        Case{"NoYaml", "nprocs: 1\nmodel: [gpt\n", "", {"run.yaml:", "not valid YAML"}},
        Case{"Tab", "model:\n\tkind: gpt\n", "", {"run.yaml:2:1: there is a tab; indent with spaces"}},
        Case{"TabBehindSpaces", "a:\n  \tb: 1\n", "", {"run.yaml:2:3: there is a tab; indent with spaces"}},
        Case{"TwoDocuments", "nprocs: 1\n---\nnprocs: 2\n", "", {"run.yaml: it has several YAML documents"}},
        // yaml-cpp finds documents without end in it.
        Case{"EndlessDocuments", "&x a\n? ", "", {"run.yaml: it has several YAML documents"}}),
    [](const auto& info) { return info.param.name; });

TEST(Config, NamesTheFileThatIsNotThere) {
  const auto refused = refusal([] { load_config("/nowhere/run.yaml", {}, {}); });
  EXPECT_TRUE(says(refused, {"/nowhere/run.yaml", "No such file"}));
}

TEST(Config, RefusesADirectoryAsAFile) {
  const auto folder = std::filesystem::temp_directory_path().string();
  EXPECT_TRUE(says(refusal([&] { load_config(folder, {}, {}); }), {folder, "is a directory"}));
}

TEST(Config, RefusesAListThatIsNone) {
  const auto list_refusal = [](const std::string& text) {
    return refusal([&] { load_config("", Sets{"data.files=" + text}, {}); });
  };
  EXPECT_EQ(list_refusal("[*.txt]").key, "data.files");
  EXPECT_TRUE(says(list_refusal("[*.txt]"), {"--set data.files=[*.txt]", "not a YAML list", "'*.txt'"}));
  EXPECT_TRUE(says(list_refusal("[a, [b]]"), {"data.files", "item 2 is not a string"}));
  EXPECT_TRUE(says(list_refusal("[a, {b: c}]"), {"data.files", "item 2 is not a string"}));
  EXPECT_TRUE(says(list_refusal("[~]"), {"data.files", "item 1 is not a string"}));
  EXPECT_TRUE(says(list_refusal("[a] [b]"), {"data.files", "not a YAML list"}));
}

Refusal environment_refusal(const std::string& variable, const std::string& value) {
  return refusal([&] { load_config("", {}, {{variable, value}}); });
}

TEST(Config, NamesTheVariableThatIsWrong) {
  EXPECT_TRUE(says(environment_refusal("ACCELMGR_NPROCS", "many"),
                   {"environment ACCELMGR_NPROCS: nprocs is 'many'", "from 1 to 24"}));
  EXPECT_TRUE(says(environment_refusal("ACCELMGR_NPROCS", ""), {"nprocs is ''"}));
  EXPECT_TRUE(says(environment_refusal("ACCELMGR_OPTIMIZER__KIND", "lbfgs"), {"closure several times"}));
}

TEST(Config, NamesTheVariableThatWasMeant) {
  EXPECT_TRUE(says(environment_refusal("ACCELMGR_NPROC", "1"), {"ACCELMGR_NPROC:", "'ACCELMGR_NPROCS'"}));
  EXPECT_TRUE(says(environment_refusal("ACCELMGR_MODEL_KIND", "gpt"), {"'ACCELMGR_MODEL__KIND'"}));
  EXPECT_TRUE(says(environment_refusal("ACCELMGR_MODEL__KINDS", "gpt"), {"'ACCELMGR_MODEL__KIND'"}));
  EXPECT_TRUE(says(environment_refusal("ACCELMGR_nprocs", "1"), {"'ACCELMGR_NPROCS'"}));
  EXPECT_TRUE(
      says(environment_refusal("ACCELMGR_TEA__POT", "1"), {"ACCELMGR_TEA__POT", "unknown key 'tea.pot'"}));
  EXPECT_TRUE(says(environment_refusal("ACCELMGR_MODEL", "gpt"), {"model is a section"}));
}

TEST(Config, PassesOverVariablesThatAreNoConfiguration) {
  const Environment environment{{"ACCELMGR_PYTHON", "/usr/bin/python3"},
                                {"ACCELMGR_LOG_LEVEL", "debug"},
                                {"ACCELMGR_LAUNCH_BACKEND", "shm"},
                                {"ACCELMGR_DISTRIBUTED_BACKEND", "shm"},
                                {"ACCELMGR_WORLD_SIZE", "2"},
                                {"ACCELMGR_TEAPOT", "full"},
                                {"NPROCS", "9"},
                                {"HOME__SWEET", "1"}};
  EXPECT_EQ(load_config("", {}, environment).config, Config{});
}

Refusal flag_refusal(const std::string& set) {
  return refusal([&] { load_config("", Sets{set}, {}); });
}

TEST(Config, NamesTheFlagThatIsWrong) {
  EXPECT_TRUE(says(flag_refusal("nprocs"), {"--set nprocs: it must have the form key=value"}));
  EXPECT_TRUE(says(flag_refusal("=2"), {"it must have the form key=value"}));
  EXPECT_TRUE(says(flag_refusal("nprocs=0"), {"--set nprocs=0: nprocs is '0'", "from 1 to 24"}));
  EXPECT_TRUE(says(flag_refusal("nproc=1"), {"--set nproc=1: unknown key 'nproc'; did you mean 'nprocs'?"}));
  EXPECT_TRUE(says(flag_refusal("model=gpt"), {"model is a section"}));
  EXPECT_TRUE(says(flag_refusal("model.options=1"), {"model.options is a section"}));
}

TEST(Config, NamesTheOptionThatWasTyped) {
  const auto typed = [](std::vector<Setting> settings, const std::string& yaml = "{}") {
    const YamlFile file(yaml);
    return refusal([&] {
      load_config(
          file.path(), settings, {},
          {{"launch.nnodes", "--nnodes"}, {"launch.rendezvous", "--rendezvous"}, {"nprocs", "--runners"}});
    });
  };
  EXPECT_EQ(typed({{"train.steps=abc", "", "--steps"}}).text,
            "--steps is 'abc'; it must be a whole number of at least 1");
  EXPECT_EQ(typed({{"train.steps=abc", "", "--steps"}}).key, "train.steps");
  EXPECT_TRUE(
      says(typed({{"launch.nnodes=2", "", "--nnodes"}}), {"--nnodes is 2, but --rendezvous is empty"}));
  EXPECT_TRUE(says(typed({{"launch.nnodes=2", "", "--hosts"}}), {"--hosts is 2, but --rendezvous is empty"}));
  EXPECT_TRUE(says(typed({{"launch.nnodes=2"}}), {"launch.nnodes is 2, but --rendezvous is empty"}));
  EXPECT_TRUE(says(typed({}, "launch.nnodes: 2\n"), {"launch.nnodes is 2, but --rendezvous is empty"}));
  EXPECT_TRUE(says(
      typed({{"runners.min_runners=3"}}),
      {"there are 2 runners (--runners) (runners.min_runners comes from: --set runners.min_runners=3)"}));
}

TEST(Config, NamesTheCallThatPassedAValue) {
  const auto passed = [](const std::string& assignment, const std::string& where) {
    const std::vector<Setting> settings{{assignment, where}};
    return refusal([&] { load_config("", settings, {}); });
  };
  EXPECT_TRUE(
      says(passed("nprocs=0", "Manager(nprocs=0)"), {"Manager(nprocs=0): nprocs is '0'; it must be"}));
  EXPECT_TRUE(says(passed("nproc=1", "Manager(nproc=1)"), {"Manager(nproc=1): unknown key 'nproc'"}));
  EXPECT_TRUE(says(passed("runners.min_runners=3", "Manager(runners={'min_runners': 3})"),
                   {"(runners.min_runners comes from: Manager(runners={'min_runners': 3}))"}));
}

TEST(Config, IsNoDevice) {
  EXPECT_TRUE(says(refusal([] { load_config("/dev/zero", {}, {}); }), {"/dev/zero", "more than 16 MiB"}));
  EXPECT_EQ(load_config("/dev/null", {}, {}).config, Config{});
}

TEST(Config, KnowsWhatOtherLibrariesCallAKey) {
  for (const auto& [name, key] :
       std::map<std::string, std::string>{{"batch_size", "batch_size_per_device"},
                                          {"num_workers", "nprocs"},
                                          {"WORLD_SIZE", "nprocs"},
                                          {"accumulation", "grad_accumulation_steps"},
                                          {"timeout", "step_timeout"},
                                          {"seed", "seed_base"}})
    EXPECT_TRUE(says(flag_refusal(name + "=1"), {"unknown key '" + name + "'; did you mean '" + key + "'?"}));
}

}  // namespace
}  // namespace accelmgr::config
