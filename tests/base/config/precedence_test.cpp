// Checks that a flag overrides the environment, the environment a file, and a file the defaults, and that the
// source of every value is reported.
#include <unistd.h>

#include "base/config/support.hpp"

namespace accelmgr::config {
namespace {

TEST(Config, IsTheDefaultWithoutSources) {
  const auto loaded = load_config("", {}, {});
  EXPECT_EQ(loaded.config, Config{});
  for (const auto& [key, source] : loaded.sources) EXPECT_EQ(source, "default") << key;
}

TEST(Config, MayBeAnEmptyFile) {
  for (const auto* text : {"", "\n", "# nothing yet\n", "---\n", "model:\n  # kind: gpt\n"})
    EXPECT_EQ(load_text(text).config, Config{}) << text;
}

TEST(Config, ReadsNestedMapsAndDottedKeysAlike) {
  const auto nested = load_text("optimizer:\n  kind: sgd\nmodel:\n  gpt:\n    heads: 2\n").config;
  const auto dotted = load_text("optimizer.kind: sgd\nmodel.gpt.heads: 2\n").config;
  const auto mixed = load_text("optimizer: {kind: sgd}\nmodel:\n  gpt.heads: 2\n").config;
  EXPECT_EQ(nested.optimizer.kind, OptimizerKind::sgd);
  EXPECT_EQ(nested.model.gpt.heads, 2);
  EXPECT_EQ(dotted, nested);
  EXPECT_EQ(mixed, nested);
}

TEST(Config, PrefersFlagToEnvironmentToFileToDefault) {
  const YamlFile file("nprocs: 3\nprefetch: 3\nseed_base: 3\n");
  const Environment environment{{"ACCELMGR_NPROCS", "4"}, {"ACCELMGR_PREFETCH", "4"}};
  const auto loaded = load_config(file.path(), Sets{"nprocs=5"}, environment);
  EXPECT_EQ(loaded.config.nprocs, 5);
  EXPECT_EQ(loaded.config.prefetch, 4);
  EXPECT_EQ(loaded.config.seed_base, 3u);
  EXPECT_EQ(loaded.config.grad_accumulation_steps, 1);
  EXPECT_EQ(loaded.sources.at("nprocs"), "flag");
  EXPECT_EQ(loaded.sources.at("prefetch"), "environment ACCELMGR_PREFETCH");
  EXPECT_EQ(loaded.sources.at("seed_base"), "file " + file.path() + ":3");
  EXPECT_EQ(loaded.sources.at("grad_accumulation_steps"), "default");
}

TEST(Config, HasARunnerForEachDeviceWhereDevicesAreCountedAndNothingSaysHowMany) {
  const auto nprocs = [](const Sets& sets) { return load_config("", sets, {}).config.nprocs; };
  EXPECT_EQ(nprocs(Sets{"runners.device=auto"}), one_per_device);
  EXPECT_EQ(nprocs(Sets{"runners.device=cuda"}), one_per_device);
  EXPECT_EQ(nprocs(Sets{"runners.device=cuda", "nprocs=2"}), 2);
  EXPECT_EQ(nprocs(Sets{"runners.device=xla"}), one_per_device);
  EXPECT_EQ(nprocs(Sets{"runners.device=xla", "nprocs=2"}), 2);
  EXPECT_EQ(nprocs(Sets{"runners.device=cpu"}), 2);
  EXPECT_EQ(load_config("", Sets{"runners.device=cuda"}, {{"ACCELMGR_NPROCS", "3"}}).config.nprocs, 3);
  EXPECT_EQ(load_text("runners.device: auto\n").config.nprocs, one_per_device);
}

TEST(Config, CountsTheLastFlagOfAKey) {
  EXPECT_EQ(load_config("", Sets{"nprocs=3", "nprocs=4"}, {}).config.nprocs, 4);
}

TEST(Config, ReadsNestedKeysFromTheEnvironment) {
  const auto config =
      load_config("", {}, {{"ACCELMGR_MODEL__GPT__HEADS", "8"}, {"ACCELMGR_MODEL__KIND", "gpt"}}).config;
  EXPECT_EQ(config.model.kind, "gpt");
  EXPECT_EQ(config.model.gpt.heads, 8);
}

TEST(Config, SplitsListsAtCommasOutsideOfFiles) {
  const std::vector<std::string> two{"a.txt", "b/*.txt"};
  EXPECT_EQ(load_config("", Sets{"data.files=a.txt,b/*.txt"}, {}).config.data.files, two);
  EXPECT_EQ(load_config("", {}, {{"ACCELMGR_DATA__FILES", "a.txt,b/*.txt"}}).config.data.files, two);
  EXPECT_EQ(load_text("data.files: [a.txt, b/*.txt]\n").config.data.files, two);
  EXPECT_EQ(load_text("data.files: 'a,b.txt'\n").config.data.files, std::vector<std::string>{"a,b.txt"});
  EXPECT_TRUE(load_text("data.files: [a.txt]\n", {"data.files="}).config.data.files.empty());
}

TEST(Config, ReadsListsOfYamlOutsideOfFiles) {
  const auto files = [](const std::string& text) {
    const auto flag = load_config("", Sets{"data.files=" + text}, {}).config.data.files;
    EXPECT_EQ(load_config("", {}, {{"ACCELMGR_DATA__FILES", text}}).config.data.files, flag) << text;
    return flag;
  };
  using Files = std::vector<std::string>;
  EXPECT_EQ(files("[a.txt, b.txt]"), (Files{"a.txt", "b.txt"}));
  EXPECT_EQ(files("['a,b.txt', \"[c]*\"]"), (Files{"a,b.txt", "[c]*"}));
  EXPECT_EQ(files("[]"), Files{});
  EXPECT_EQ(files("[ab]*.txt,c.txt"), (Files{"[ab]*.txt", "c.txt"})) << "a pattern is no list";
}

TEST(Config, MergesTheEntriesOfFreeMaps) {
  const auto loaded = load_text("model:\n  options:\n    path: here\n    depth: 3\n",
                                {"model.options.depth=5"}, {{"ACCELMGR_MODEL__OPTIONS__WIDTH", "7"}});
  const std::map<std::string, std::string> expected{{"path", "here"}, {"depth", "5"}, {"width", "7"}};
  EXPECT_EQ(loaded.config.model.options, expected);
  EXPECT_EQ(loaded.sources.at("model.options.depth"), "flag");
  EXPECT_EQ(loaded.sources.at("model.options.width"), "environment ACCELMGR_MODEL__OPTIONS__WIDTH");
}

TEST(Config, KeepsEqualSignsInTheValueOfAFlag) {
  EXPECT_EQ(load_config("", Sets{"data.options.query=a=b"}, {}).config.data.options.at("query"), "a=b");
}

TEST(Config, FindsItsOwnVariablesInTheProcess) {
  ASSERT_EQ(::setenv("ACCELMGR_NPROCS", "7", 1), 0);
  const auto found = accelmgr_environment();
  ASSERT_EQ(::unsetenv("ACCELMGR_NPROCS"), 0);
  EXPECT_EQ(found.at("ACCELMGR_NPROCS"), "7");
  for (const auto& [variable, value] : found) EXPECT_TRUE(variable.starts_with("ACCELMGR_")) << variable;
}

TEST(ConfigShow, PrintsEveryKeyWithValueAndSource) {
  const auto loaded = load_text("optimizer:\n  learning_rate: 2e-3\n", {"model.options.note=a b"});
  const auto text = show(loaded);
  for (const auto& [key, source] : loaded.sources) {
    const auto line_start = text.rfind("\n" + key + " ");
    EXPECT_TRUE(line_start != std::string::npos || text.starts_with(key + " ")) << key;
  }
  const auto line_of = [&](const std::string& key) {
    const auto start = text.find("\n" + key + " ") + 1;
    return text.substr(start, text.find('\n', start) - start);
  };
  EXPECT_NE(line_of("optimizer.learning_rate").find(" 0.002 "), std::string::npos);
  EXPECT_TRUE(line_of("optimizer.learning_rate").ends_with("run.yaml:2"));
  EXPECT_NE(line_of("model.options.note").find("\"a b\""), std::string::npos);
  EXPECT_TRUE(line_of("nprocs").find(" 2 ") != std::string::npos || text.starts_with("nprocs"));
}

}  // namespace
}  // namespace accelmgr::config
