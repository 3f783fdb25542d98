// Tests of unread(): which keys have no effect in a program that makes the steps itself.
#include "base/config/support.hpp"

namespace accelmgr::config {
namespace {

std::string reason(const std::string& set, Own own, const Sets& kinds = {}) {
  auto sets = kinds;
  sets.push_back({set});
  const auto key = set.substr(0, set.find('='));
  for (const auto& found : unread(load_config("", sets, {}), own))
    if (found.key == key) return found.why;
  return "";
}

constexpr Own everything{.model = true, .data = true};
const Sets gpt_on_text{"model.kind=gpt", "data.kind=text", "data.files=a.txt"};

TEST(Unread, IsWhatTheProgramDecides) {
  for (const auto own : {Own{}, everything}) {
    EXPECT_NE(reason("optimizer.learning_rate=0.5", own).find("makes its optimizer"), std::string::npos);
    EXPECT_NE(reason("train.steps=7", own).find("how many steps"), std::string::npos);
    EXPECT_NE(reason("launch.nprocs=3", own).find("accelmgr spawn"), std::string::npos);
    EXPECT_NE(reason("checkpoint.every=3", own, {"checkpoint.directory=/tmp/d"}).find("save_checkpoint()"),
              std::string::npos);
  }
}

TEST(Unread, IsWhatDescribesAModelOrDatasetThatTheProgramPasses) {
  for (const auto* set :
       {"model.gpt.layers=2", "model.file=x.pt", "model.options.depth=3", "model.mlp.output_size=3"})
    EXPECT_NE(reason(set, everything).find("model is the program's own"), std::string::npos) << set;
  for (const auto* set : {"data.seed=1", "data.elements=5", "data.files=a,b", "data.held_out=0.5",
                          "data.sequence_length=5", "data.options.path=x"})
    EXPECT_NE(reason(set, everything).find("dataset is the program's own"), std::string::npos) << set;
}

TEST(Unread, IsWhatTheKindDoesNotRead) {
  EXPECT_EQ(reason("model.mlp.hidden_size=5", Own{}, gpt_on_text), "model.kind gpt does not read it");
  EXPECT_EQ(reason("model.factory=a:b", Own{}, gpt_on_text), "model.kind gpt does not read it");
  EXPECT_EQ(reason("model.gpt.layers=5", Own{}, {"model.kind=python"}), "model.kind python does not read it");
  EXPECT_EQ(reason("data.seed=5", Own{}, {"data.kind=python"}), "data.kind python does not read it");
  EXPECT_EQ(reason("data.elements=5", Own{}, gpt_on_text), "data.kind text does not read it");
  EXPECT_EQ(reason("data.options.path=x", Own{}, gpt_on_text), "data.kind text does not read it");
  EXPECT_EQ(reason("data.held_out=0.5", Own{}, {"data.kind=synthetic"}),
            "data.kind synthetic does not read it");
}

TEST(Unread, IsNothingThatHasAnEffect) {
  for (const auto* set :
       {"nprocs=3", "runners.threads=2", "runners.restart_backoff=2", "on_nonfinite=keep", "seed_base=4",
        "checkpoint.keep=7", "checkpoint.directory=d", "checkpoint.resume=d/1", "memory.limit_bytes=5",
        "model.kind=own", "data.kind=own", "data.epochs=2", "data.drop_last=false"})
    EXPECT_EQ(reason(set, everything), "") << set;
  for (const auto* set : {"model.gpt.layers=2", "data.seed=1", "data.held_out=0.1", "data.sequence_length=5",
                          "data.epochs=2", "data.drop_last=false"})
    EXPECT_EQ(reason(set, Own{}, gpt_on_text), "") << set;
  for (const auto* set :
       {"model.factory=a:b", "model.options.depth=3", "data.factory=a:b", "data.options.path=x"})
    EXPECT_EQ(reason(set, Own{}, {"model.kind=python", "data.kind=python"}), "") << set;
  for (const auto* set : {"model.options.depth=3", "model.file=x", "model.gpt.layers=2"})
    EXPECT_EQ(reason(set, Own{}, {"model.kind=registered"}), "") << set << ": it may read all";
  EXPECT_TRUE(unread(load_config("", {}, {}), everything).empty());
}

TEST(Unread, IsToldWithItsSource) {
  const YamlFile file("optimizer:\n  kind: sgd\n");
  const auto found = unread(load_config(file.path(), {}, {{"ACCELMGR_TRAIN__STEPS", "5"}}), everything);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].key, "optimizer.kind");
  EXPECT_NE(found[0].source.find("run.yaml:2"), std::string::npos);
  EXPECT_EQ(found[1].source, "environment ACCELMGR_TRAIN__STEPS");
}

}  // namespace
}  // namespace accelmgr::config
