// Tests of the configurations in configs/.
#include "base/config/support.hpp"
#include "places.hpp"

namespace accelmgr::config {
namespace {

TEST(ShippedConfig, AreAllValidAndGiveNoWarnings) {
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(test::in_checkout("configs"))) {
    if (entry.path().extension() != ".yaml") continue;  // The unit for systemd, and the recipe of an image.
    EXPECT_TRUE(warnings(load_config(entry.path().string(), {}, {}).config, 2).empty()) << entry.path();
    ++files;
  }
  EXPECT_GE(files, 1u);
}

}  // namespace
}  // namespace accelmgr::config
