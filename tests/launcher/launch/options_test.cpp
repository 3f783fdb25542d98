// Tests of launch options that come from texts, deprecated ones among them, and from the configuration.
#include "launcher/launch/plan/options.hpp"

#include "launcher/launch/nodes.hpp"

namespace accelmgr::launch {
namespace {

using Texts = std::map<std::string, std::string>;

TEST(OptionTexts, SetEveryOption) {
  const auto options = options_from({{"nprocs", "3"},        {"join", "false"},
                                     {"daemon", "True"},     {"start_method", "forkserver"},
                                     {"backend", "gloo"},    {"gpus", "4,5"},
                                     {"xpus", "1"},          {"ips", "a,b"},
                                     {"master_addr", "c"},   {"master_port", "7"},
                                     {"workers", "w:0;h:1"}, {"nnodes", "2"},
                                     {"node_rank", "1"},     {"rank_offset", "4"},
                                     {"world_size", "8"},    {"setup", "prepare"},
                                     {"print_config", "1"},  {"oversubscribe", "true"},
                                     {"timeout_s", "2.5"},   {"terminate_timeout_s", "1e1"},
                                     {"environment.A", "b"}});
  EXPECT_EQ(options.nprocs, 3);
  EXPECT_FALSE(options.join);
  EXPECT_TRUE(options.daemon);
  EXPECT_EQ(options.start_method, StartMethod::forkserver);
  EXPECT_EQ(options.backend, "gloo");
  EXPECT_EQ(options.gpus, "4,5");
  EXPECT_EQ(options.xpus, "1");
  EXPECT_EQ(options.ips, "a,b");
  EXPECT_EQ(options.master_addr, "c");
  EXPECT_EQ(options.master_port, 7);
  EXPECT_EQ(options.workers, "w:0;h:1");
  EXPECT_EQ(options.nnodes, 2);
  EXPECT_EQ(options.node_rank, 1);
  EXPECT_EQ(options.rank_offset, 4);
  EXPECT_EQ(options.world_size, 8);
  EXPECT_EQ(options.setup_name, "prepare");
  EXPECT_TRUE(options.print_config);
  EXPECT_TRUE(options.oversubscribe);
  EXPECT_EQ(options.timeout_s, 2.5);
  EXPECT_EQ(options.terminate_timeout_s, 10);
  EXPECT_EQ(options.environment, (Environment{{"A", "b"}}));
}

TEST(BadOptionText, IsRefusedWithWhatWouldBeRight) {
  const auto expect_wrong = [](const std::string& name, const std::string& value,
                               const std::vector<std::string>& parts) {
    SCOPED_TRACE(name + "='" + value + "'");
    const auto [text, key] = refusal([&] { options_from({{name, value}}); });
    EXPECT_TRUE(says(text, parts));
    EXPECT_EQ(key, name);
  };
  expect_wrong("nproc", "2", {"unknown option 'nproc'", "did you mean 'nprocs'"});
  expect_wrong("gpu", "0", {"'gpus'"});
  expect_wrong("startmethod", "fork", {"'start_method'"});
  expect_wrong("teapotliness", "1", {"unknown option 'teapotliness'", "the options are", "nprocs"});
  expect_wrong("environment.", "1", {"unknown option 'environment.'"});
  expect_wrong("nprocs", "two", {"nprocs is 'two'", "a whole number"});
  for (const auto* value : {"2.5", "", "99999999999"}) expect_wrong("nprocs", value, {"a whole number"});
  expect_wrong("join", "yes", {"join is 'yes'", "true or false"});
  expect_wrong("timeout_s", "1 s", {"timeout_s is '1 s'", "seconds"});
  expect_wrong("start_method", "forkserve",
               {"start_method is 'forkserve'", "spawn or fork or forkserver", "'forkserver'"});
  for (const auto* value : {"maybe", "true"})
    expect_wrong("use_paddlecloud", value,
                 {"it must be false", "use ips, node_rank and master_port instead"});
}

TEST(DeprecatedOption, WarnsAndWorks) {
  const auto expect_same = [](const std::string& name, const Texts& texts, const Texts& same,
                              const std::string& instead) {
    SCOPED_TRACE(::testing::PrintToString(texts));
    testing::internal::CaptureStderr();
    const auto options = options_from(texts);
    EXPECT_TRUE(
        says(testing::internal::GetCapturedStderr(), {"option " + name + " is deprecated; " + instead}));
    testing::internal::CaptureStderr();
    const auto today = options_from(same);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "options of today are not warned of";
    EXPECT_EQ(std::tie(options.gpus, options.xpus, options.ips, options.master_port, options.node_rank),
              std::tie(today.gpus, today.xpus, today.ips, today.master_port, today.node_rank));
  };
  expect_same("selected_devices", {{"selected_devices", "4,5"}}, {{"gpus", "4,5"}}, "use gpus instead");
  expect_same("selected_devices", {{"selected_devices", "4,5"}, {"gpus", "1"}}, {{"gpus", "1"}},
              "use gpus instead");
  expect_same("selected_devices", {{"selected_devices", "4"}, {"backend", "bkcl"}}, {{"xpus", "4"}},
              "use xpus instead");
  expect_same("started_port", {{"started_port", "6070"}}, {{"master_port", "6070"}},
              "use master_port instead");
  expect_same("cluster_node_ips", {{"cluster_node_ips", "a,b"}}, {{"ips", "a,b"}}, "use ips instead");
  const std::string listed = "list this node in ips, or set node_rank";
  expect_same("node_ip", {{"node_ip", "b"}, {"ips", "a,b"}}, {{"ips", "a,b"}, {"node_rank", "1"}}, listed);
  expect_same("node_ip", {{"node_ip", "b"}, {"cluster_node_ips", "a, b"}},
              {{"ips", "a, b"}, {"node_rank", "1"}}, listed);
  expect_same("node_ip", {{"node_ip", "b"}}, {}, listed);
  expect_same("use_paddlecloud", {{"use_paddlecloud", "false"}}, {},
              "use ips, node_rank and master_port instead");
}

TEST(DeprecatedOption, NodeIpMustBeAmongTheAddresses) {
  const auto [text, key] = refusal([] { options_from({{"node_ip", "c"}, {"ips", "a,b"}}); });
  EXPECT_TRUE(says(text, {"node_ip is 'c'", "a,b"}));
  EXPECT_EQ(key, "node_ip");
}

TEST(LaunchConfig, BecomesOptions) {
  Config config;
  config.launch.nprocs = 3;
  config.launch.nnodes = 2;
  config.launch.node_rank = 1;
  config.launch.rendezvous = "[fd00::1]:29500";
  config.launch.backend = "gloo";
  config.launch.gpus = "4,5,6";
  config.launch.workers = "w:0;h:1";
  config.launch.start_method = StartMethod::fork;
  config.launch.oversubscribe = true;
  config.launch.timeout = 7;
  config.launch.terminate_timeout = 8;
  const auto options = options_of(config);
  EXPECT_EQ(options.nprocs, 3);
  EXPECT_EQ(options.nnodes, 2);
  EXPECT_EQ(options.node_rank, 1);
  EXPECT_EQ(options.master_addr, "fd00::1");
  EXPECT_EQ(options.master_port, 29500);
  EXPECT_EQ(options.backend, "gloo");
  EXPECT_EQ(options.gpus, "4,5,6");
  EXPECT_EQ(options.workers, "w:0;h:1");
  EXPECT_EQ(options.start_method, StartMethod::fork);
  EXPECT_TRUE(options.oversubscribe);
  EXPECT_EQ(options.timeout_s, 7);
  EXPECT_EQ(options.terminate_timeout_s, 8);
}

TEST(LaunchConfig, IsOneNodeByDefault) {
  const auto spec = resolve(options_of(Config{}), cpu_node(3));
  EXPECT_EQ(spec.nnodes, 1);
  EXPECT_EQ(spec.world_size, 3);
  EXPECT_EQ(spec.master_addr, "127.0.0.1");
}

TEST(LaunchConfig, LeavesTheNumberOfProcessesToEachNode) {
  Config config;
  config.launch.nnodes = 2;
  config.launch.node_rank = 1;
  config.launch.rendezvous = "10.0.0.1:29500";
  const auto spec = resolve(options_of(config), cpu_node(3));
  EXPECT_EQ(spec.world_size, 6);
  EXPECT_EQ(spec.rank(0), 3);
}

TEST(LaunchConfig, MustHaveAHostAndAPortAsItsRendezvous) {
  Config config;
  config.launch.rendezvous = "10.0.0.1";
  const auto [text, key] = refusal([&] { options_of(config); });
  EXPECT_TRUE(says(text, {"launch.rendezvous: '10.0.0.1'"}));
  EXPECT_EQ(key, "launch.rendezvous");
  config.launch.rendezvous = "10.0.0.1:0";
  EXPECT_EQ(options_of(config).master_port, 0);
  config.launch.nnodes = 2;
  EXPECT_EQ(refusal([&] { options_of(config); }).key, "launch.rendezvous");
}

}  // namespace
}  // namespace accelmgr::launch
