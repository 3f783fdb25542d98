// Machines that a launch is resolved for.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"
#include "launch/plan.hpp"

namespace accelmgr::launch {

using Environment = std::map<std::string, std::string>;

inline Machine cpu_machine(int cores, Environment environment = {}) {
  return {.environment = std::move(environment),
          .cores = cores,
          .gpus = 0,
          .hostname = "node1.cluster",
          .addresses = {"127.0.0.1", "10.0.0.1", "::1", "fd00::1"},
          .unavailable_because = [](const std::string&) { return std::string(); }};
}

/// With NCCL.
inline Machine gpu_machine(int gpus, Environment environment = {}) {
  auto machine = cpu_machine(8, std::move(environment));
  machine.gpus = gpus;
  return machine;
}

inline Machine without(const std::string& missing, const std::string& why, Machine machine) {
  machine.unavailable_because = [=](const std::string& backend) { return backend == missing ? why : ""; };
  return machine;
}

/// The second host of those that tests name: 10.0.0.1 (node1), 10.0.0.2 (node2).
inline Machine second(Machine machine) {
  machine.hostname = "node2.cluster";
  machine.addresses = {"127.0.0.1", "10.0.0.2", "::1", "fd00::2"};
  return machine;
}

/// The text and the key of the ConfigError that `call` throws; a failed test if it throws none.
template <class Call>
std::pair<std::string, std::string> refusal(Call&& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return {error.what(), error.key()};
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

inline ::testing::AssertionResult says(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts)
    if (text.find(part) == std::string::npos)
      return ::testing::AssertionFailure() << "no '" << part << "' in: " << text;
  return ::testing::AssertionSuccess();
}

}  // namespace accelmgr::launch
