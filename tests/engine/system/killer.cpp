#include "killer.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <sstream>

#include "accelmgr/errors.hpp"
#include "base/ipc/proc_file.hpp"
#include "engine/data/random.hpp"

namespace accelmgr::test {
namespace {

/// The killer reports each deed as one letter.
const std::map<char, std::string> deeds{
    {'r', "runner"},         {'l', "fork server"},         {'m', "manager"},         {'h', "host"},
    {'R', "runner stopped"}, {'L', "fork server stopped"}, {'M', "manager stopped"}, {'H', "host stopped"}};

struct Victim {
  char kind;
  pid_t pid;
};

/// From /proc/PID/stat: "PID (NAME) STATE PARENT ..."
struct Process {
  std::string name;
  char state;
  pid_t parent;
};

std::optional<Process> process(pid_t pid) {
  const auto text = ipc::read_proc(fmt::format("/proc/{}/stat", pid));
  if (!text) return std::nullopt;
  const auto open = text->find('('), close = text->rfind(')');
  if (open == std::string::npos || close == std::string::npos) return std::nullopt;
  Process found{.name = text->substr(open + 1, close - open - 1), .state = 0, .parent = 0};
  std::istringstream(text->substr(close + 1)) >> found.state >> found.parent;
  if (found.state == 'Z' || found.state == 'X') return std::nullopt;
  return found;
}

char kind_of(const std::string& name) {
  if (name == "accelmgr:mgr") return 'm';
  if (name == "accelmgr:fork") return 'l';
  if (name == tortured_host) return 'h';
  return name.starts_with("accelmgr:run") ? 'r' : 0;
}

/// The descendants of this process: its manager, the fork server below the manager, the runners below that;
/// and its hosts. Other processes are left out.
std::vector<Victim> victims_of(pid_t test) {
  std::map<pid_t, Process> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const auto name = entry.path().filename().string();
    pid_t pid = 0;
    if (std::from_chars(name.data(), name.data() + name.size(), pid).ec != std::errc{}) continue;
    if (auto found = process(pid)) all.emplace(pid, std::move(*found));
  }
  const auto is_of_test = [&](pid_t pid) {
    for (int generations = 0; generations < 3; ++generations) {
      const auto found = all.find(pid);
      if (found == all.end() || kind_of(found->second.name) == 0) return false;
      pid = found->second.parent;
      if (pid == test) return true;
    }
    return false;
  };
  std::vector<Victim> victims;
  for (const auto& [pid, found] : all) {
    const char kind = kind_of(found.name);
    // A manager's child has its name until it executes a fork server.
    if (is_of_test(pid) && (kind != 'm' || found.parent == test)) victims.push_back({kind, pid});
  }
  return victims;
}

class Role {
 public:
  explicit Role(const KillerOptions& options) : options_(options), random_(options.seed) {}

  int play() {
    while (killed_ < options_.most) {
      if (!pause_between()) return 0;
      if (const auto victim = choose()) strike(*victim);
    }
    pause(-1);
    return 0;
  }

 private:
  double uniform() { return static_cast<double>(random_.next() >> 11) * 0x1p-53; }

  /// Waits `seconds`, or without a limit if negative. Returns false if the test has told the killer to end.
  bool pause(double seconds) {
    pollfd end{.fd = role_waits, .events = POLLIN, .revents = 0};
    return poll(&end, 1, seconds < 0 ? -1 : static_cast<int>(std::lround(seconds * 1e3))) == 0;
  }

  bool pause_between() {
    const double ratio = options_.longest_pause_s / options_.shortest_pause_s;
    return pause(options_.shortest_pause_s * std::pow(ratio, uniform()));
  }

  std::optional<Victim> choose() {
    const std::pair<char, double> shares[] = {{'m', manager_is_stopped_ ? 0 : options_.managers},
                                              {'l', options_.fork_servers},
                                              {'h', options_.hosts},
                                              {'r', options_.runners}};
    double draw = 0;
    for (const auto& [kind, share] : shares) draw += share;
    draw *= uniform();
    char kind = 'r';
    for (const auto& [each, share] : shares) {
      kind = each;
      if (draw < share) break;
      draw -= share;
    }
    auto victims = victims_of(test_);
    std::erase_if(victims, [kind](const Victim& v) { return v.kind != kind; });
    if (victims.empty()) return std::nullopt;
    return victims[random_.below(victims.size())];
  }

  void strike(Victim victim) {
    base::UniqueFd pidfd;
    try {
      pidfd = ipc::open_pidfd(victim.pid);
    } catch (const SystemError&) {
      return;
    }
    // The pid may have been reused before the pidfd was opened: looks at the process again.
    const auto found = process(victim.pid);
    if (!found || kind_of(found->name) != victim.kind) return;
    if (victim.kind == 'm' && options_.longest_manager_stop_s > 0) return stop_manager(pidfd.get());
    if (uniform() >= options_.stops) return kill(pidfd.get(), victim.kind);
    stop(pidfd.get(), victim.kind);
    const bool go_on = pause(options_.longest_stop_s * uniform());
    if (uniform() < 0.5 || !go_on)
      ipc::send_signal(pidfd.get(), SIGCONT);
    else
      kill(pidfd.get(), victim.kind);
  }

  void stop_manager(int pidfd) {
    const bool is_quiet = uniform() < 0.5;
    const double stop_s = options_.longest_manager_stop_s * (is_quiet ? 0.7 + 0.3 * uniform() : uniform());
    const auto until = base::Deadline::in_seconds(stop_s);
    stop(pidfd, 'm');
    manager_is_stopped_ = true;
    if (is_quiet) pause(stop_s);
    while (!until.passed() && pause_between())
      if (const auto victim = choose()) strike(*victim);
    manager_is_stopped_ = false;
    ipc::send_signal(pidfd, SIGCONT);
  }

  void stop(int pidfd, char kind) {
    ipc::send_signal(pidfd, SIGSTOP);
    say(static_cast<char>(kind - 'a' + 'A'));
  }

  void kill(int pidfd, char kind) {
    if (ipc::has_ended(pidfd)) return;
    ipc::send_signal(pidfd, SIGKILL);
    say(kind);
    ++killed_;
  }

  void say(char deed) {
    if (write(role_says, &deed, 1) != 1) _exit(3);
  }

  KillerOptions options_;
  data::Random random_;
  pid_t test_ = getppid();
  int killed_ = 0;
  bool manager_is_stopped_ = false;
};

std::string as_text(const KillerOptions& o) {
  return fmt::format("{} {} {} {} {} {} {} {} {} {} {}", o.seed, o.most, o.runners, o.fork_servers,
                     o.managers, o.hosts, o.stops, o.longest_stop_s, o.longest_manager_stop_s,
                     o.shortest_pause_s, o.longest_pause_s);
}

KillerOptions options_of(const std::string& text) {
  KillerOptions o;
  std::istringstream(text) >> o.seed >> o.most >> o.runners >> o.fork_servers >> o.managers >> o.hosts >>
      o.stops >> o.longest_stop_s >> o.longest_manager_stop_s >> o.shortest_pause_s >> o.longest_pause_s;
  return o;
}

const RegisteredRole killer(kills_at_random, [](const Arguments& arguments, int, char**) {
  return Role(options_of(arguments.at(0))).play();
});

}  // namespace

Killer::Killer(const KillerOptions& options)
    : process_(std::in_place, kills_at_random, std::vector{as_text(options)}) {}

Killer::~Killer() { end(); }

Kills Killer::end() {
  if (!process_) return {};
  process_->let_go();
  Kills done;
  for (const char deed : process_->line()) ++done[deeds.at(deed)];
  process_->status();
  process_.reset();
  return done;
}

}  // namespace accelmgr::test
