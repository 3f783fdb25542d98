// This node and the environment of this process: the second input of resolve(), besides the options. The
// launch spec is a pure function of both.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace accelmgr::launch {

struct NodeInfo {
  std::map<std::string, std::string> environment;  ///< The variables of this process.
  int cores = 1;                                   ///< Cores that this process may run on.
  int gpus = 0;                                    ///< GPUs of the driver; ignores CUDA_VISIBLE_DEVICES.
  std::string hostname;
  std::vector<std::string> addresses;  ///< Of all interfaces, as text; IPv6 without brackets and zone.
};

std::string own_hostname();

/// Uses no device library, so it creates no device context and loads nothing.
NodeInfo this_node();

}  // namespace accelmgr::launch
