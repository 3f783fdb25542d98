// A service in a process of its own, for tests with tensors. The program that uses it has service_main.cpp.
#pragma once

#include <string>

#include "base/ipc/process.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {

/// Serves small_config("mlp"); `faults` of it are those.
class ServiceProcess {
 public:
  explicit ServiceProcess(const std::string& fault = "");
  /// Ends the service, and expects that it ends well.
  ~ServiceProcess();
  ServiceProcess(const ServiceProcess&) = delete;
  ServiceProcess& operator=(const ServiceProcess&) = delete;

  std::string socket() const { return folder_ / "socket"; }

 private:
  TemporaryFolder folder_;
  ipc::Child process_;
};

}  // namespace accelmgr::test
