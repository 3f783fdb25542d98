// Drives a session in the place of a host, for requests that come without one: it takes the lease, runs a job
// on a thread, and gives the lease back.
#pragma once

#include <boost/asio/io_context.hpp>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "engine/client/checkpoints.hpp"
#include "engine/client/stepper.hpp"
#include "engine/manager/served_manager.hpp"

namespace accelmgr::service {

/// What a job works with.
struct Drive {
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
  /// Gets what the job threw, or null. Called when the session is free again.
  using Done = std::function<void(std::exception_ptr)>;

  LocalDriver(boost::asio::io_context& loop, manager::ServedManager& manager, std::string run_id)
      : loop_(loop), manager_(manager), run_(client::Run::OfService{std::move(run_id)}) {}

  bool is_busy() const noexcept { return done_ != nullptr; }
  /// Starts a job. The session must be free, and no job under way. Throws SystemError, SessionError.
  void run(Job job, Done done);
  /// Call it when the session has become free.
  void freed();

 private:
  boost::asio::io_context& loop_;
  manager::ServedManager& manager_;
  client::Run run_;
  Done done_;
  std::exception_ptr thrown_;
  bool has_returned_ = false;
};

}  // namespace accelmgr::service
