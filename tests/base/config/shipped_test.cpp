// Tests of the configurations in configs/.
#include "base/config/support.hpp"
#include "places.hpp"

namespace accelmgr::config {
namespace {

TEST(ShippedConfig, TrainsTheGptOnLicences) {
  const auto config = load_config(test::in_checkout("configs/gpt-licenses.yaml"), {}, {}).config;
  EXPECT_EQ(config.model.kind, "gpt");
  EXPECT_EQ(config.data.kind, "text");
  EXPECT_EQ(config.data.files, std::vector<std::string>{"/usr/share/common-licenses/*"});
  EXPECT_EQ(config.nprocs, 2);
  EXPECT_EQ(config.train.steps, 300);
  EXPECT_EQ(config.nprocs * config.batch_size_per_device * config.grad_accumulation_steps *
                config.data.sequence_length,
            4096);
  EXPECT_TRUE(warnings(config, 2).empty());
}

TEST(ShippedConfig, AreAllValid) {
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(test::in_checkout("configs"))) {
    if (entry.path().extension() != ".yaml") continue;  // The unit for systemd, and the recipe of an image.
    EXPECT_NO_THROW(load_config(entry.path().string(), {}, {})) << entry.path();
    ++files;
  }
  EXPECT_GE(files, 1u);
}

}  // namespace
}  // namespace accelmgr::config
