// Checks that wrong values and keys of every source are refused, and that the error says what is wrong,
// where, and what would be right.
#include "base/config/support.hpp"

namespace accelmgr::config {
namespace {

TEST(BadFile, IsRefusedWithPlaceAndRemedy) {
  const auto expect_bad = [](const std::string& yaml, const std::string& key,
                             const std::vector<std::string>& parts) {
    SCOPED_TRACE(yaml);
    const auto refused = refusal([&] { load_text(yaml); });
    EXPECT_TRUE(says(refused, parts));
    EXPECT_EQ(refused.key, key);
  };
  // Keys.
  expect_bad("prefetch: 3\nnproc: 2\n", "nproc", {"run.yaml:2: ", "'nproc'", "did you mean 'nprocs'?"});
  expect_bad("optimizer:\n  kind: sgd\n  learning-rate: 1\n", "optimizer.learning-rate",
             {"run.yaml:3: ", "'optimizer.learning_rate'"});
  expect_bad("optimiser:\n  kind: sgd\n", "optimiser", {"run.yaml:1: ", "'optimizer'"});
  expect_bad("optimiser.kind: sgd\n", "optimiser.kind", {"'optimizer.kind'"});
  expect_bad("learning_rate: 1\n", "learning_rate", {"'optimizer.learning_rate'"});
  expect_bad("MODEL.Kind: gpt\n", "MODEL.Kind", {"'model.kind'"});
  expect_bad("optimizer:\n  lr: 1\n", "optimizer.lr",
             {"run.yaml:2: ", "the keys of 'optimizer' are kind, learning_rate"});
  expect_bad("nprocs: 1\nprefetch: 1\nnprocs: 2\n", "nprocs",
             {"run.yaml:3: nprocs is set a second time; the first time is in line 1"});
  expect_bad("data:\n  seed: 1\ndata:\n  epochs: 1\n", "data", {"run.yaml:3: ", "line 1"});
  expect_bad("data.seed: 1\ndata:\n  seed: 2\n", "data.seed", {"run.yaml:3: ", "line 1"});
  expect_bad("model.options:\n  \"\": 1\n", "model.options.", {"unknown key 'model.options.'"});
  expect_bad("? [a, b]\n: 1\n", "", {"run.yaml:1: a key must be a name"});

  // Values.
  expect_bad("nprocs: two\n", "nprocs", {"run.yaml:1: nprocs is 'two'", "whole number from 1 to 24"});
  expect_bad("nprocs: \"2\"\n", "nprocs", {"nprocs is the string '2'"});
  expect_bad("nprocs: 2.0\n", "nprocs", {"'2.0'"});
  expect_bad("nprocs: [1, 2]\n", "nprocs", {"nprocs is a list (1, 2)"});
  expect_bad("nprocs:\n  a: 1\n", "nprocs", {"run.yaml:1: ", "single value"});
  expect_bad("nprocs:\n", "nprocs", {"run.yaml:1: nprocs has no value"});
  expect_bad("data.files:\n  - a\n  -\n", "data.files", {"no value"});
  expect_bad("\n\nnprocs: 0\n", "nprocs", {"run.yaml:3: nprocs is '0'"});
  expect_bad("nprocs: 25\n", "nprocs", {"nprocs is '25'"});
  expect_bad("train.steps: 99999999999999999999\n", "train.steps", {"of at least 1"});
  expect_bad("seed_base: -1\n", "seed_base", {"'-1'", "whole number of at least 0"});
  expect_bad("optimizer.learning_rate: inf\n", "optimizer.learning_rate", {"'inf'", "of at least 0"});
  expect_bad("optimizer.learning_rate: nan\n", "optimizer.learning_rate", {"'nan'"});
  expect_bad("model.gpt.dropout: 1\n", "model.gpt.dropout", {"of at least 0 and below 1"});
  expect_bad("deterministic: yes\n", "deterministic", {"'yes'", "true or false"});
  expect_bad("optimizer.kind: adamW\n", "optimizer.kind",
             {"'adamW'", "sgd or adam or adamw", "did you mean 'adamw'?"});
  expect_bad("optimizer:\n  kind: lbfgs\n", "optimizer.kind",
             {"run.yaml:2: ", "closure several times per update"});
  expect_bad("model: gpt\n", "model", {"run.yaml:1: model is a section"});
  expect_bad("model.options: x\n", "model.options", {"model.options is a section"});
  expect_bad("model.options:\n  a: {b: 1}\n", "model.options.a", {"run.yaml:2: ", "single value"});
  expect_bad("model.options: &m\n  a: *m\n", "model.options.a", {"single value"});

  // Files.
  expect_bad("- nprocs\n", "", {"run.yaml:1: a configuration must be a map"});
  expect_bad("nprocs: 1\nmodel: [gpt\n", "", {"run.yaml:", "not valid YAML"});
  expect_bad("model:\n\tkind: gpt\n", "", {"run.yaml:2:1: there is a tab; indent with spaces"});
  expect_bad("a:\n  \tb: 1\n", "", {"run.yaml:2:3: "});
  expect_bad("nprocs: 1\n---\nnprocs: 2\n", "", {"run.yaml: it has several YAML documents"});
  // yaml-cpp finds documents without end in it.
  expect_bad("&x a\n? ", "", {"several YAML documents"});
}

TEST(Config, RefusesWhatIsNoFile) {
  const auto refused = [](const std::string& path) { return refusal([&] { load_config(path, {}, {}); }); };
  EXPECT_TRUE(says(refused("/nowhere/run.yaml"), {"/nowhere/run.yaml", "No such file"}));
  const auto folder = std::filesystem::temp_directory_path().string();
  EXPECT_TRUE(says(refused(folder), {folder, "is a directory"}));
  EXPECT_TRUE(says(refused("/dev/zero"), {"/dev/zero", "more than 16 MiB"}));
  EXPECT_EQ(load_config("/dev/null", {}, {}).config, Config{});
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
  EXPECT_EQ(environment_refusal("ACCELMGR_NPROCS", "").key, "nprocs");
  EXPECT_EQ(environment_refusal("ACCELMGR_OPTIMIZER__KIND", "lbfgs").key, "optimizer.kind");
  EXPECT_TRUE(says(environment_refusal("ACCELMGR_MODEL", "gpt"), {"model is a section"}));
}

TEST(Config, NamesTheVariableThatWasMeant) {
  for (const auto& [wrong, meant] :
       std::map<std::string, std::string>{{"ACCELMGR_NPROC", "ACCELMGR_NPROCS"},
                                          {"ACCELMGR_MODEL_KIND", "ACCELMGR_MODEL__KIND"},
                                          {"ACCELMGR_MODEL__KINDS", "ACCELMGR_MODEL__KIND"},
                                          {"ACCELMGR_nprocs", "ACCELMGR_NPROCS"}})
    EXPECT_TRUE(says(environment_refusal(wrong, "1"), {wrong, "'" + meant + "'"}));
  EXPECT_TRUE(
      says(environment_refusal("ACCELMGR_TEA__POT", "1"), {"ACCELMGR_TEA__POT", "unknown key 'tea.pot'"}));
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
  EXPECT_TRUE(says(flag_refusal("=2"), {"key=value"}));
  EXPECT_TRUE(says(flag_refusal("nprocs=0"), {"--set nprocs=0: nprocs is '0'"}));
  EXPECT_TRUE(says(flag_refusal("nproc=1"), {"--set nproc=1: unknown key 'nproc'"}));
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
  EXPECT_TRUE(says(passed("runners.min_runners=3", "Manager(runners={'min_runners': 3})"),
                   {"(runners.min_runners comes from: Manager(runners={'min_runners': 3}))"}));
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
