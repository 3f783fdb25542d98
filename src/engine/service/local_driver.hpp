// Drives a session in the place of a host, for a request: runs a job on a thread of the service.
#pragma once

#include <boost/asio/io_context.hpp>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "engine/client/checkpoints.hpp"
#include "engine/client/stepper.hpp"
#include "engine/manager/manager.hpp"

namespace accelmgr::service {

/// What a job works with.
struct Drive {
  const session::Session& session;
  client::Stepper& stepper;
  client::Checkpoints& checkpoints;
  std::shared_ptr<const checkpoint::HostFiles> last;  ///< Null: there is no checkpoint yet.

  /// Saves one with what the last host has saved. `directory`: empty for `checkpoint.directory`.
  void save(const std::string& directory = {}) { checkpoints.save_with(last.get(), directory); }
};

/// Used by the thread of the loop.
class LocalDriver {
 public:
  using Job = std::function<void(Drive&)>;
  /// Gets what the job threw, or null. Called when no attempt is open any more.
  using Done = std::function<void(std::exception_ptr)>;

  LocalDriver(boost::asio::io_context& loop, manager::Manager& manager, std::string run_id)
      : loop_(loop), manager_(manager), run_(std::move(run_id), manager::Tenure::of_service) {}

  bool is_busy() const noexcept { return done_ != nullptr || manager_.lease().is_driven_here(); }
  /// Starts a job. No job must be under way, and a host that has the lease must wait. Throws SystemError,
  /// SessionError.
  void run(Job job, Done done);

 private:
  void end_when_done();

  boost::asio::io_context& loop_;
  manager::Manager& manager_;
  client::Run run_;
  Done done_;
  std::exception_ptr thrown_;
  bool has_returned_ = false, is_over_ = false;  ///< The job, and what the lease says of it.
};

}  // namespace accelmgr::service
