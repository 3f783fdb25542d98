// Trains on a service while its hosts are killed at random, and checks that the result is that of an
// undisturbed run.
//
// Hosts of several users wait for the lease all the time. Each drives the session for some steps, and then
// leaves, or is killed: by a killer process (killer.hpp) or a timer at any instant, or by itself at places
// where little time is spent. The next one looks at what was left, and goes on as the schedule says.
// Meanwhile runners and the fork server are killed as in the other torture (torture.hpp). The service is
// stopped and continued. Nobody may end it.
#pragma once

#include <cstdint>
#include <string>

#include "torture_course.hpp"

namespace accelmgr::test {

struct ServiceTortureOptions {
  std::uint64_t seed = 0;
  std::uint64_t steps = 4000;
  double injected = 400;      ///< The expected number of kills of runners by the fault library.
  double longest_life_s = 0;  ///< Of a service, until it is killed; 0: it is not.
  KillerOptions killer = gentle_to_services();
  std::string log_file;  ///< The service, its runners and the hosts log there; removed if nothing failed.

  static KillerOptions gentle_to_services();
};

struct ServiceTortureReport : RoundReport {
  std::uint64_t steps_made = 0;  ///< Steps, and those that were lost with killed services.
  std::uint64_t services = 0;
  int checkpoints = 0;                  ///< That hosts have asked for.
  std::uint64_t hosts = 0, leases = 0;  ///< Processes, and how often one of them was admitted.
  int users = 1;                        ///< Of these processes. Only root starts those of others.
  Kills ends;                           ///< How hosts ended that the killer process has not killed.
  Kills found;                          ///< What hosts found when they attached, and in their steps.

  int kills() const;  ///< Of runners, fork servers and hosts.
};

/// Makes the undisturbed run, then the disturbed one. After each step, after each update and whenever a host
/// attaches, parameters, gradients, buffers and counters are compared. Orphans of this process's descendants
/// must become its children.
ServiceTortureReport service_torture(const ServiceTortureOptions& options);

}  // namespace accelmgr::test
