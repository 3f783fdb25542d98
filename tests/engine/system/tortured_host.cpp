#include "tortured_host.hpp"

#include <fmt/format.h>
#include <grp.h>
#include <limits.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/ipc/process.hpp"
#include "base/log.hpp"
#include "engine/data/random.hpp"

namespace accelmgr::test {
namespace {

// Shorter than the killer stops a service at the longest.
constexpr double attach_patience_s = 3, step_patience_s = 1;

static_assert(std::is_trivially_copyable_v<Said> && sizeof(Said) <= PIPE_BUF,
              "written at once or not at all");

void become(const HostUser& user) {
  const gid_t groups[] = {user.group};
  if (setgroups(1, groups) != 0) throw SystemError("setgroups", errno);
  if (setgid(user.gid) != 0) throw SystemError("setgid", errno);
  if (setuid(user.uid) != 0) throw SystemError("setuid", errno);
  prctl(PR_SET_DUMPABLE, 1);  // As a program is that this user has started.
}

/// Whether each number is that in one of two others, in its real and in its imaginary part.
bool is_mix(const Tensors& is, const Tensors& one, const Tensors& other) {
  for (std::size_t t = 0; t < is.size(); ++t) {
    const auto bytes = size_of(is[t].dtype) / session::elements_in(is[t].dtype);
    for (std::size_t i = 0; i < is[t].bytes.size(); i += bytes) {
      const auto* element = is[t].bytes.data() + i;
      if (std::memcmp(element, one[t].bytes.data() + i, bytes) != 0 &&
          std::memcmp(element, other[t].bytes.data() + i, bytes) != 0)
        return false;
    }
  }
  return true;
}

Tensors zeros_like(Tensors tensors) {
  for (auto& tensor : tensors) std::ranges::fill(tensor.bytes, std::byte{0});
  return tensors;
}

bool contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

/// A process that has ended and is not reaped yet does not live.
bool lives(pid_t pid, base::Deadline until = base::Deadline::at_ns(0)) {
  try {
    return !ipc::wait_ended(ipc::open_pidfd(pid).get(), until);
  } catch (const SystemError&) {
    return false;
  }
}

/// What no death of a service excuses.
struct Wrong : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class TorturedHost {
 public:
  explicit TorturedHost(const HostTask& task)
      : task_(task), course_(task.course), board_(task.board), random_(task.seed, 1, task.number) {}

  void live() {
    while (!board_.over) {
      auto manager = attach();
      if (!manager) continue;
      service_ = manager->statistics().manager_pid;
      try {
        drive(*manager);
      } catch (const Error& error) {
        const bool stood_still = contains(error.what(), "has stood still");
        // A process that ends closes its sockets first.
        if (!stood_still && (!task_.services_end || lives(service_, base::Deadline::in_seconds(5)))) throw;
        say(stood_still ? Said::What::stood_still : Said::What::lost);
        leave_seat();
      }
    }
  }

  void say(Said said) const {
    said.pid = getpid();
    said.service = service_;
    if (::write(task_.says, &said, sizeof said) != sizeof said) _exit(3);
  }

 private:
  void say(Said::What what, const State& state = {}) const {
    Said said{};
    said.what = what;
    said.state = state;
    say(said);
  }

  bool lucky(double probability) { return static_cast<double>(random_.next() >> 11) * 0x1p-53 < probability; }

  /// Ends this process at any instant from now on, at the latest after so long.
  void set_timer(double probability, std::uint64_t longest_us) {
    if (!lucky(probability)) return;
    itimerval timer{};
    timer.it_value.tv_usec = static_cast<suseconds_t>(1 + random_.below(longest_us));
    setitimer(ITIMER_REAL, &timer, nullptr);
  }

  [[noreturn]] void end(HostEnd how) {
    ++board_.ends[static_cast<std::size_t>(how)];
    if (how != HostEnd::exits) raise(SIGKILL);
    _exit(0);
  }
  void maybe_end(HostEnd how, double probability) {
    if (lucky(probability)) end(how);
  }

  std::optional<client::Handle> attach() {
    // Not always: the first step of such a host overwrites gradients, which the schedule allows between
    // blocks.
    keeps_ = is_within_block_ || lucky(0.8);
    set_timer(0.05, 10'000);
    try {
      return client::Handle(
          "./socket", {.name = "tortured host", .timeout_s = attach_patience_s, .keep_gradients = keeps_});
    } catch (const Error& error) {
      const bool refused = contains(error.what(), "drives the session");
      const bool unanswered = contains(error.what(), "did not answer in time");
      if (!refused && !unanswered && !task_.services_end) throw;
      ++(refused ? board_.refused : unanswered ? board_.unanswered : board_.unreached);
    }
    // A random time, so that hosts meet the service at any instant. No verdict depends on it.
    const timespec pause{.tv_sec = 0, .tv_nsec = static_cast<long>(1'000'000 + random_.below(20'000'000))};
    nanosleep(&pause, nullptr);
    return std::nullopt;
  }

  std::uint64_t seat() const { return std::uint64_t(service_) << 32 | std::uint64_t(getpid()); }
  void take_seat() {
    const auto other = board_.driver.exchange(seat());
    if (const auto pid = static_cast<pid_t>(other & 0xffffffff); other >> 32 == seat() >> 32 && lives(pid))
      throw Wrong(
          fmt::format("process {} was admitted, but process {} lives and has not detached", getpid(), pid));
  }
  void leave_seat() {
    auto own = seat();
    board_.driver.compare_exchange_strong(own, 0);
  }

  /// A child with all descriptors of this process, which outlives it until the run is over. How often it
  /// looks decides nothing.
  void maybe_fork() {
    if (!lucky(0.05) || fork() != 0) return;
    prctl(PR_SET_NAME, "user's child");  // The killer goes by names.
    const timespec pause{.tv_sec = 0, .tv_nsec = 10'000'000};
    while (!board_.over && (kill(test_, 0) == 0 || errno != ESRCH)) nanosleep(&pause, nullptr);
    _exit(0);
  }

  void drive(client::Handle& manager) {
    take_seat();
    maybe_fork();
    look(manager);
    auto steps = manager.statistics().steps;
    is_within_block_ = !is_first_of_block(steps);
    if (is_within_block_ && !keeps_) return detach(manager);
    if (!manager.unfinished().empty())
      write(manager, course_.parameters.at(steps / steps_per_update));
    else if (!is_within_block_ && manager.left_gradients() == LeftGradients::unapplied)
      write(manager, updated(manager));
    for (; steps < course_.states.size() && !lucky(0.02); ++steps) step(manager, steps);
    is_within_block_ = !is_first_of_block(steps);
    maybe_end(HostEnd::exits, 0.3);
    detach(manager);
  }

  void detach(client::Handle& manager) {
    ++board_.ends[static_cast<std::size_t>(HostEnd::detaches)];
    leave_seat();
    manager.stop();
  }

  /// Reports what is there, and looks at what the test cannot know: which elements are new and which are old.
  void look(const client::Handle& manager) const {
    const auto state = state_of(manager);
    const bool unfinished = !manager.unfinished().empty();
    const auto left = manager.left_gradients();
    const auto block = state.steps / steps_per_update;
    if (unfinished && block > 0 &&
        !is_mix(parameters_of(manager), course_.parameters.at(block - 1), course_.parameters.at(block)))
      throw Wrong(fmt::format("after step {}: parameters are half written, and some are neither old nor new",
                              state.steps));
    if (left == LeftGradients::applied && is_zeroed_before(state.steps)) {
      const auto& last = course_.gradients.at(block - 1);
      if (!is_mix(gradients_of(manager), last, zeros_like(last)))
        throw Wrong(fmt::format("after step {}: gradients are half zeroed, and some are neither old nor 0",
                                state.steps));
    }
    Said said{};
    said.what = Said::What::attached;
    said.state = state;
    said.lease = manager.session()->control().lease.load();
    said.left = left;
    said.unfinished = unfinished;
    say(said);
  }

  /// Makes a step, counted from 0.
  void step(client::Handle& manager, std::uint64_t number) {
    set_timer(0.04, 4'000);
    if (is_zeroed_before(number)) {
      manager.zero_grad();
      maybe_save(manager);
      maybe_end(HostEnd::killed_after_zeroing, 0.02);
    }
    for (;;) {
      const auto result = manager.step(
          {.timeout_s = step_patience_s, .accumulate = is_accumulated(number), .parameters_changed = false});
      if (result) break;
      if (result.status == StepStatus::manager_lost) throw Error(result.error);
      if (result.status != StepStatus::timeout || result.counted)
        throw Wrong(fmt::format("step {}: {} (counted: {}): {}", number + 1, to_string(result.status),
                                result.counted, result.error));
      say(Said::What::timed_out);
    }
    say(Said::What::stepped, state_of(manager));
    maybe_save(manager);
    if (!is_last_of_block(number)) return;
    maybe_end(HostEnd::killed_before_update, 0.02);
    write(manager, updated(manager));
    maybe_save(manager);
    maybe_end(HostEnd::killed_after_update, 0.02);
  }

  void maybe_save(client::Handle& manager) {
    if (manager.config().checkpoint.directory.empty() || !lucky(0.02)) return;
    manager.save_checkpoint({});
    ++board_.checkpoints;
    for (const auto& written : manager.checkpoints_written(0))
      if (!written.error.empty()) throw Wrong("a checkpoint: " + written.error);
  }

  void write(client::Handle& manager, const Tensors& values) {
    auto place = lucky(0.05) ? random_.below(values.size() + 1) : values.size() + 1;
    write_parameters(manager, values, [&] {
      if (place-- == 0) end(HostEnd::killed_while_writing);
    });
    say(Said::What::updated, state_of(manager));
  }

  const HostTask& task_;
  const Course& course_;
  Board& board_;
  data::Random random_;
  const pid_t test_ = getppid();
  pid_t service_ = 0;
  bool keeps_ = true;
  bool is_within_block_ = false;  ///< As far as this host knows.
};

}  // namespace

const char* to_string(HostEnd end) noexcept {
  constexpr const char* names[host_ends] = {"before an update", "while it wrote", "after an update",
                                            "after zeroing",    "exited",         "detached"};
  return names[static_cast<std::size_t>(end)];
}

void live_as_host(const HostTask& given) {
  auto task = given;
  const auto test = getppid();
  try {
    // Other ends of pipes would keep processes waiting that the test wants to end.
    task.says = 3;
    if (given.says != 3 && dup2(given.says, 3) < 0) throw SystemError("dup2", errno);
    close_range(4, ~0U, 0);
    std::filesystem::current_path(task.folder);  // Folders above it may be private.
    if (task.user) become(*task.user);
    ipc::die_with(test);  // After setuid(), which forgets it.
    ipc::name_process(tortured_host);
    base::start_logging("host");
    TorturedHost(task).live();
    _exit(0);
  } catch (const std::exception& error) {
    Said said{};
    said.what = Said::What::wrong;
    std::strncpy(said.text, error.what(), sizeof said.text - 1);
    TorturedHost(task).say(said);
    _exit(1);
  }
}

}  // namespace accelmgr::test
