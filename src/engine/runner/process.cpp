#include "engine/runner/process.hpp"

#include <fmt/format.h>
#include <malloc.h>
#include <unistd.h>

#include <cstdio>
#include <limits>

#include "base/clock.hpp"
#include "base/config/faults.hpp"
#include "base/exception_text.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"
#include "engine/replica/replica.hpp"
#include "engine/runner/runner.hpp"

namespace accelmgr::runner {
namespace {

// Backward frees and allocates the same large blocks in every step. By default malloc gives them back to the
// kernel each time: measured for 128 MiB of gradients, 80 ms instead of 43 ms.
void keep_freed_pages(const Config& config) {
  // Older ones of glibc (2.31) take no threshold of more than 32 MiB. Then no block is mapped on its own.
  if (mallopt(M_MMAP_THRESHOLD, 1 << 30) == 0) mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, 2'000'000'000);
  // A thread works with the device. A thread other than the first one has an arena of its own by default,
  // which gives heaps of 64 MiB back as they become empty.
  if (config.runners.device == Device::xla || config.runners.device == Device::accelerator)
    mallopt(M_ARENA_MAX, 1);
}

/// Opens this rank's device while other ranks open theirs or build. Returns false if the manager is gone.
bool open_and_wait(const Config& config, int rank, int lifeline) {
  replica::open_device(config, replica::Role::runner(rank));
  ipc::send(lifeline, said_opened);
  // Others may build for long. The wait ends with the manager at the latest.
  const auto ever = base::Deadline::in_seconds(std::numeric_limits<double>::infinity());
  return ipc::receive(lifeline, ever).has_value();
}

}  // namespace

int run(const Config& config, ipc::SpawnRequest request) {
  const auto begin = base::now_ns();
  ipc::leave_signals_to_host();
  ipc::be_killed_first();
  base::start_logging(fmt::format("rank {}", request.rank));
  const base::UniqueFd lifeline = std::move(request.fds.back());
  request.fds.pop_back();
  auto session =
      session::Session::attach(std::move(request.fds), request.rank, config.runners.protect_parameters);
  session.keep_from_children();
  const session::RunnerView view(session, request.rank);
  auto& record = view.record();
  base::keep_log_tail(record.log.text, record.log.written);
  try {
    record.reason.store(session::Reason::none);
    record.error[0] = 0;
    config::arm_faults(config, request.rank, request.generation);
    keep_freed_pages(config);
    if (config.runners.device == Device::cuda && !open_and_wait(config, request.rank, lifeline.get()))
      _exit(0);
    Runner runner(config, view, lifeline.get());
    record.start_ns.store(static_cast<std::uint64_t>(base::now_ns() - begin));
    ipc::send(lifeline.get(), said_ready);
    runner.serve();
    std::fflush(nullptr);
    _exit(0);      // Skips destructors: those of a model's library may take long.
  } catch (...) {  // User code, for instance a factory, may throw any type.
    if (!session::ends_runner(record.reason.load())) {
      const auto what = base::current_exception_text();
      record.error[what.copy(record.error, session::text_bytes - 1)] = 0;
      record.reason.store(session::Reason::exception);
    }
    base::log().info("{}",
                     static_cast<const char*>(record.error));  // The supervisor reports it, with this line.
    _exit(exit_failed);
  }
}

}  // namespace accelmgr::runner
