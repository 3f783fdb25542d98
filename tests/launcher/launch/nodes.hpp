// Nodes for which tests resolve a launch.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"
#include "launcher/launch/plan/launch_spec.hpp"
#include "refusal.hpp"

namespace accelmgr::launch {

using test::refusal;
using test::says;

using Environment = std::map<std::string, std::string>;

inline NodeInfo cpu_node(int cores, Environment environment = {}) {
  return {.environment = std::move(environment),
          .cores = cores,
          .gpus = 0,
          .hostname = "node1.cluster",
          .addresses = {"127.0.0.1", "10.0.0.1", "::1", "fd00::1"}};
}

/// A node with GPUs.
inline NodeInfo gpu_node(int gpus, Environment environment = {}) {
  auto node_info = cpu_node(8, std::move(environment));
  node_info.gpus = gpus;
  return node_info;
}

/// Makes it the second of the nodes that the tests name: 10.0.0.1 (node1) and 10.0.0.2 (node2).
inline NodeInfo second(NodeInfo node_info) {
  node_info.hostname = "node2.cluster";
  node_info.addresses = {"127.0.0.1", "10.0.0.2", "::1", "fd00::2"};
  return node_info;
}

}  // namespace accelmgr::launch
