// Tests that ports are bound once, and accept connections from then on.
#include "launcher/launch/run/ports.hpp"

#include "base/ipc/host_port.hpp"
#include "base/ipc/tcp.hpp"
#include "launcher/launch/nodes.hpp"
#include "message_of.hpp"

namespace accelmgr::launch {
namespace {

/// Throws if nobody accepts connections at the port.
void connect_to(int port) { ipc::wait_for_listener("127.0.0.1", port, base::Deadline::in_seconds(5)); }

TEST(BoundPort, AcceptsConnectionsAtOnceAndIsNobodyElsesWhileItIsHeld) {
  const auto first = bind_port();
  const auto second = bind_port(first.port);
  EXPECT_GT(second.port, first.port);
  EXPECT_NO_THROW(connect_to(first.port));
}

TEST(BoundPort, IsRefusedWhereThereIsNone) {
  EXPECT_TRUE(says(test::message_of<UsageError>([] { bind_port(65536); }), {"65536", "65535"}));
  EXPECT_TRUE(says(test::message_of<UsageError>([] { bind_port(-1); }), {"-1", "65535"}));
  const auto last = bind_port(65535);
  EXPECT_TRUE(
      says(test::message_of<SystemError>([] { bind_port(65535); }), {"from 65535 to 65535", "in use"}));
}

TEST(WorkerPorts, AreThoseThatTheSpecTellsAndAreHandedToTheirProcesses) {
  const auto node_info = gpu_node(2, {{"ACCELMGR_GPU_NUM_DEVICES", "2"}});
  auto spec = resolve({}, node_info);
  EXPECT_TRUE(spec.xla.workers.empty());
  const auto ports = bind_worker_ports(spec, node_info);
  ASSERT_EQ(spec.xla.workers.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(spec.xla.workers[i],
              (Worker{"localservice", static_cast<int>(i), {"node1.cluster", ports.workers[i].port}}));
    EXPECT_EQ(spec.endpoints[i], text(spec.xla.workers[i].address));
    EXPECT_NO_THROW(connect_to(ports.workers[i].port));
  }
  EXPECT_EQ(spec.xla.service_address, text(ipc::HostPort{"node1.cluster", ports.service.port}));
  EXPECT_NO_THROW(connect_to(ports.service.port));
  EXPECT_TRUE(says(text(spec), {"(ports bound here)", "(port bound here)"}));
  using Pairs = std::vector<std::pair<int, int>>;
  EXPECT_EQ(ports.descriptors(0),
            (Pairs{{ports.workers[0].socket.get(), 50}, {ports.service.socket.get(), 51}}));
  EXPECT_EQ(ports.descriptors(1), (Pairs{{ports.workers[1].socket.get(), 50}}));
}

TEST(WorkerPorts, AreNoneWhereSpecsNeedNone) {
  const auto node_info = cpu_node(2);
  for (const Options& options : {Options{.nprocs = 2}, Options{.nprocs = 1, .workers = "a:0;10.0.0.1:7"},
                                 Options{.nprocs = 2, .workers = "a:0;10.0.0.1:7|a:1;10.0.0.2:7"}}) {
    auto spec = resolve(options, node_info);
    const auto before = text(spec);
    const auto ports = bind_worker_ports(spec, node_info);
    EXPECT_TRUE(ports.workers.empty());
    EXPECT_FALSE(ports.service.socket);
    EXPECT_TRUE(ports.descriptors(0).empty());
    EXPECT_EQ(text(spec), before);
  }
}

}  // namespace
}  // namespace accelmgr::launch
