// Promise P2 under force: a step counts exactly once or not at all, whichever process is killed, at any
// instant.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "service_torture.hpp"
#include "torture.hpp"

namespace accelmgr::test {
namespace {

/// Of steps and kills. Under a sanitizer each kill takes a second.
#ifdef ACCELMGR_SANITIZED
constexpr int part = 6;
#else
constexpr int part = 1;
#endif

/// TORTURE_SEED repeats a run; without it each run has another seed.
std::uint64_t seed() {
  if (const char* given = std::getenv("TORTURE_SEED")) return std::strtoull(given, nullptr, 10);
  return std::random_device{}();
}

TEST(Torture, TrainingUnderKillsEndsBitwiseAsWithoutThem) {
  constexpr int fewest_kills = 100 / part;
  TortureOptions options;
  options.seed = seed();
  options.steps /= part;
  options.injected = 200.0 / part;
  options.killer.most = 80;
  options.log_file = testing::TempDir() + fmt::format("accelmgr-torture-{}.log", options.seed);
  fmt::print("TORTURE_SEED={}\n", options.seed);
  std::fflush(stdout);

  const auto report = torture(options);
  fmt::print("{} steps: undisturbed {:.1f} s, with {} kills {:.1f} s\n", report.steps, report.undisturbed_s,
             report.kills(), report.disturbed_s);
  fmt::print("killed from outside: {}\ninjected: {}\nlosses {}, recoveries {} (and {} that failed)\n",
             report.killed, report.injected, report.losses, report.recoveries, report.failed_recoveries);
  EXPECT_EQ(report.failure, "") << "TORTURE_SEED=" << options.seed << ", log in " << options.log_file;
  EXPECT_EQ(report.steps, static_cast<std::uint64_t>(options.steps));
  EXPECT_GE(report.kills(), fewest_kills);
  EXPECT_GE(report.losses, std::uint64_t{1});
  EXPECT_GE(report.recoveries, std::uint64_t{1});
}

void train_on_service(double longest_life_s) {
  constexpr int fewest_kills = 150 / part;
  ServiceTortureOptions options;
  options.seed = seed();
  options.steps = options.steps / part / 4 * 4;  // In blocks of four.
  options.injected /= part;
  options.longest_life_s = longest_life_s;
  options.log_file = testing::TempDir() + fmt::format("accelmgr-service-torture-{}.log", options.seed);
  fmt::print("TORTURE_SEED={}\n", options.seed);
  std::fflush(stdout);

  const auto report = service_torture(options);
  fmt::print("{} steps, {} made: undisturbed {:.1f} s, with {} kills {:.1f} s\n", report.steps,
             report.steps_made, report.undisturbed_s, report.kills(), report.disturbed_s);
  fmt::print("{} services, {} checkpoints, {} hosts of {} users, {} leases\n", report.services,
             report.checkpoints, report.hosts, report.users, report.leases);
  if (report.users == 1) fmt::print("NOT TESTED: hosts of other users, which only root can start\n");
  fmt::print("killed from outside: {}\ninjected: {}\nhosts by themselves: {}\nfound: {}\nlosses {}\n",
             report.killed, report.injected, report.ends, report.found, report.losses);
  EXPECT_EQ(report.failure, "") << "TORTURE_SEED=" << options.seed << ", log in " << options.log_file;
  EXPECT_EQ(report.steps, options.steps);
  EXPECT_GE(report.kills(), fewest_kills);
  EXPECT_GE(report.losses, std::uint64_t{1});
}

TEST(Torture, TrainingOnAServiceWhoseHostsAreKilledEndsBitwiseAsWithoutThem) { train_on_service(0); }

TEST(Torture, TrainingOnServicesThatAreKilledGoesOnFromTheirCheckpoints) { train_on_service(10); }

}  // namespace
}  // namespace accelmgr::test
