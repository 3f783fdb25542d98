// Hosts for which tests resolve a launch.
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

inline HostInfo cpu_host(int cores, Environment environment = {}) {
  return {.environment = std::move(environment),
          .cores = cores,
          .gpus = 0,
          .hostname = "node1.cluster",
          .addresses = {"127.0.0.1", "10.0.0.1", "::1", "fd00::1"}};
}

/// A host with GPUs.
inline HostInfo gpu_host(int gpus, Environment environment = {}) {
  auto host_info = cpu_host(8, std::move(environment));
  host_info.gpus = gpus;
  return host_info;
}

/// Makes it the second of the hosts that the tests name: 10.0.0.1 (node1) and 10.0.0.2 (node2).
inline HostInfo second(HostInfo host_info) {
  host_info.hostname = "node2.cluster";
  host_info.addresses = {"127.0.0.1", "10.0.0.2", "::1", "fd00::2"};
  return host_info;
}

}  // namespace accelmgr::launch
