// Tests of listing accelerators, in folders that look like /dev, /proc and /sys.
#include "base/ipc/device_nodes.hpp"

#include <gmock/gmock.h>

#include "temporary_folder.hpp"

namespace accelmgr::ipc {
namespace {

using testing::ElementsAre;

class Accelerators : public testing::Test {
 protected:
  void add(const std::string& file, const std::string& text = "") const { root_.write(file, text); }
  void add_pci(const std::string& name, const std::string& vendor, const std::string& device) const {
    add("sys/bus/pci/devices/" + name + "/vendor", vendor + "\n");
    add("sys/bus/pci/devices/" + name + "/device", device + "\n");
  }
  const std::filesystem::path& root() const { return root_.path(); }

 private:
  accelmgr::test::TemporaryFolder root_;
};

TEST_F(Accelerators, AreNoneOnAnEmptyMachine) {
  EXPECT_TRUE(gpu_nodes(root()).empty());
  EXPECT_EQ(driver_gpus(root()), 0);
  EXPECT_EQ(tpu_chips(root()), 0);
}

TEST_F(Accelerators, AreTheNodesOfGpusInTheirOrderAndNotTheDriversOther) {
  for (const char* node : {"nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm", "nvidia2x", "null"})
    add(std::string("dev/") + node);
  const auto dev = root() / "dev";
  EXPECT_THAT(gpu_nodes(root()), ElementsAre(dev / "nvidia0", dev / "nvidia2", dev / "nvidia10"));
  for (const char* gpu : {"0", "1", "2", "3"}) add(std::string("proc/driver/nvidia/gpus/") + gpu);
  EXPECT_EQ(driver_gpus(root()), 3) << "a container has some of the machine's GPUs";
}

TEST_F(Accelerators, AreThoseOfADriverThatHasMadeNoNodesYet) {
  for (const char* gpu : {"0", "1"}) add(std::string("proc/driver/nvidia/gpus/") + gpu);
  EXPECT_EQ(driver_gpus(root()), 2);
}

TEST_F(Accelerators, AreTpuChipsAndNotOtherCardsOfGoogle) {
  add_pci("0000:00:04.0", "0x1ae0", "0x0063");
  add_pci("0000:00:05.0", "0x1ae0", "0x005e");
  add_pci("0000:00:06.0", "0x1ae0", "0x0042");  // A network card.
  add_pci("0000:00:07.0", "0x10de", "0x0063");
  EXPECT_EQ(tpu_chips(root()), 2);
}

}  // namespace
}  // namespace accelmgr::ipc
