// A service in a process of its own, and hosts that attach to it in processes of their own.
#pragma once

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/config.hpp"
#include "engine/client/handle.hpp"
#include "engine/client/service_socket.hpp"
#include "role_process.hpp"
#include "stage.hpp"
#include "staged_run.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {

/// The role of a service: the path of its configuration (YAML), that of its socket, and, if its members may
/// use it too, the number of a group.
inline constexpr const char* serves = "serves";
/// The role of a host: the path of the socket, and then what it does, one word each: "step", "write" (begins
/// to write parameters), "tear" (the same, and writes one), "update" (the same, and ends it), "zero" (its
/// gradients), "again" (executes this program as another host, which makes a step), "detach"; or "at once"
/// alone: attaches without patience, and says why it cannot. It says a line after each, and then waits for
/// the test.
inline constexpr const char* attaches = "attaches";

/// The role of an observer: the path of the socket. It says "observes", and then reads steps and parameters
/// until it is killed.
inline constexpr const char* observes = "observes";

/// The answer to a request.
struct Answer {
  int status = 0;
  nlohmann::json body;
  std::string code() const { return body.contains("error") ? body["error"]["code"].get<std::string>() : ""; }
};

class ServiceRun {
 public:
  /// On a stage of its own. A lost runner is replaced at once.
  ServiceRun() : ServiceRun([](Config&) {}) {}
  /// The same with what `change` changes.
  explicit ServiceRun(const std::function<void(Config&)>& change)
      : ServiceRun(std::make_unique<const Stage>(), change) {}
  explicit ServiceRun(const Config& config);
  /// Ends the service by SIGTERM, if it has not ended, and checks that nothing is left.
  ~ServiceRun();
  ServiceRun(const ServiceRun&) = delete;
  ServiceRun& operator=(const ServiceRun&) = delete;

  std::string socket() const { return folder_ / "socket"; }
  const TemporaryFolder& folder() const { return folder_; }
  const Processes& processes() const { return processes_; }
  int runner(int rank) const { return processes_.runners.at(static_cast<std::size_t>(rank)).get(); }
  pid_t pid() const { return service_.pid(); }
  int pidfd() const { return service_.pidfd(); }

  /// Returns when a signal has stopped the runner.
  void wait_until_stopped(int rank) const;
  /// Returns when no host has the lease.
  void wait_until_alone() const;

  Answer ask(const std::string& method, const std::string& target, const std::string& body = "",
             const std::string& head = "") const;
  nlohmann::json status() const { return ask("GET", "/v1/status").body; }
  /// Attaches this process.
  client::Handle attach(bool keep_gradients = true) const;
  /// Sends SIGTERM. Returns the wait status.
  int terminate();
  /// Sends SIGKILL and waits for its end. Its socket is left.
  void kill();
  /// Waits for its end after another signal.
  int wait() {
    ended_ = true;
    return service_.status();
  }

 private:
  ServiceRun(std::unique_ptr<const Stage> stage, const std::function<void(Config&)>& change)
      : ServiceRun([&] {
          auto config = restarting(*stage);
          change(config);
          return config;
        }()) {
    stage_ = std::move(stage);
  }

  std::unique_ptr<const Stage> stage_;
  TemporaryFolder folder_;
  std::string configuration_;
  RoleProcess service_;
  Processes processes_;
  bool ended_ = false;
};

/// A host in a process of its own.
class AttachedHost : public RoleProcess {
 public:
  AttachedHost(const ServiceRun& service, std::vector<std::string> deeds);
};

}  // namespace accelmgr::test
