// A process that watches the session of a service. It maps the session's memory for reading, and the service
// does not know it: nothing that it does, or fails to do, reaches a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "accelmgr/statistics.hpp"
#include "accelmgr/step_result.hpp"
#include "base/ipc/process.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/session.hpp"

namespace accelmgr::client {

/// See accelmgr::ParameterCopy. `values` is laid out as Session::parameters().
struct ParameterValues {
  std::uint64_t version = 0;
  std::uint64_t step = 0;
  std::shared_ptr<std::byte[]> values{};
};

/// See accelmgr::Observer. Waits throw SessionError when base::interrupted() says so.
class Observer {
 public:
  /// socket_path() finds the service.
  static Observer attach(const std::string& service, double timeout_s);

  const session::Header& header() const noexcept { return session_->header(); }
  const session::Manifest& manifest() const noexcept { return manifest_; }
  bool has_ended() const noexcept { return ipc::has_ended(service_.pidfd.get()); }
  Statistics statistics() const;
  std::optional<StepResult> last_step() const noexcept;
  std::optional<StepResult> next_step(double timeout_s);
  ParameterValues parameters(double timeout_s) const;

 private:
  Observer(std::string path, ipc::Child service, session::Session session);
  [[noreturn]] void refuse(const std::string& what, const std::string& why) const;

  std::string path_;
  ipc::Child service_;
  std::unique_ptr<const session::Session> session_;
  session::Manifest manifest_;
  std::uint64_t seen_ = 0;  ///< The number of the last record that next_step() has returned.
};

}  // namespace accelmgr::client
