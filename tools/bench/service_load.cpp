// Measures what clients of a service cost the host that drives it: its steps alone, and while 1,000 requests
// a second come over 8 connections and 100 clients follow the events. Both take turns.
//
// The service, the clients and the host are a process each. Host and runner compute on the first core of this
// process, the service and its clients on the last one: what the service costs them is not what two processes
// cost each other that want one core.
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "accelmgr/errors.hpp"
#include "accelmgr/init.hpp"
#include "accelmgr/manager.hpp"
#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "engine/service/service.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;

constexpr int connections = 8, subscribers = 100;
constexpr std::int64_t interval_ns = 1'000'000;
constexpr std::array targets{"/v1/status", "/metrics", "/v1/steps?limit=16", "/healthz"};

/// What the host and the clients share.
struct Shared {
  std::atomic<int> wanted, reached;  ///< 1: the clients ask. `reached` follows when they do.
  std::atomic<std::uint64_t> answers, errors, event_bytes;
};

Config mlp() {
  Config config;
  config.nprocs = 1;
  config.batch_size_per_device = 16;
  config.runners.threads = 1;
  config.model.kind = "mlp";
  config.model.mlp = {.input_size = 512, .hidden_size = 512, .hidden_layers = 2, .output_size = 10};
  return config;
}

// ---- Clients ----

base::UniqueFd connected(const std::string& path) {
  base::UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    throw SystemError("connect", errno);
  fcntl(fd.get(), F_SETFL, O_NONBLOCK);
  return fd;
}

void ask(int fd, const char* target) {
  const auto request = fmt::format("GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n", target);
  if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request.size()))
    throw SystemError("send", errno);
}

class Asking {
 public:
  explicit Asking(const std::string& path) : fd_(connected(path)) {}
  int fd() const { return fd_.get(); }
  bool is_free() const { return free_; }
  void begin(const char* target) {
    ask(fd(), target);
    free_ = false;
  }
  /// True when the answer is whole.
  bool read() {
    std::array<char, 65536> part;
    const auto bytes = recv(fd(), part.data(), part.size(), 0);
    if (bytes <= 0) throw std::runtime_error("the service has closed a connection");
    answer_.append(part.data(), static_cast<std::size_t>(bytes));
    const auto head = answer_.find("\r\n\r\n");
    if (head == std::string::npos) return false;
    constexpr std::string_view field = "Content-Length: ";
    const auto length = answer_.find(field);
    std::size_t body = 0;
    std::from_chars(answer_.data() + length + field.size(), answer_.data() + head, body);
    if (answer_.size() < head + 4 + body) return false;
    is_good_ = answer_.starts_with("HTTP/1.1 200 ");
    answer_.clear();
    return free_ = true;
  }
  bool is_good() const { return is_good_; }

 private:
  base::UniqueFd fd_;
  std::string answer_;
  bool free_ = true, is_good_ = false;
};

/// Asks until `wanted` is 0 again.
void ask_and_follow(const std::string& path, Shared& shared) {
  std::vector<Asking> asking;
  std::vector<base::UniqueFd> following;
  std::vector<pollfd> polled;
  for (int i = 0; i < connections; ++i) polled.push_back({asking.emplace_back(path).fd(), POLLIN, 0});
  for (int i = 0; i < subscribers; ++i) {
    polled.push_back({following.emplace_back(connected(path)).get(), POLLIN, 0});
    ask(following.back().get(), "/v1/events");
  }
  shared.reached = 1;
  std::array<char, 65536> ignored;
  auto next_ns = base::now_ns();
  std::size_t turn = 0;
  while (shared.wanted != 0) {
    for (auto& one : asking)
      if (one.is_free() && base::now_ns() >= next_ns) {
        one.begin(targets[turn++ % targets.size()]);
        next_ns += interval_ns;
      }
    const auto left_ns = std::max<std::int64_t>(next_ns - base::now_ns(), 100'000);
    const timespec wait{.tv_sec = 0, .tv_nsec = static_cast<long>(std::min(left_ns, interval_ns))};
    if (ppoll(polled.data(), polled.size(), &wait, nullptr) < 0) throw SystemError("poll", errno);
    for (std::size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      if (i < connections) {
        if (asking[i].read()) ++(asking[i].is_good() ? shared.answers : shared.errors);
        continue;
      }
      const auto bytes = recv(polled[i].fd, ignored.data(), ignored.size(), 0);
      if (bytes <= 0) throw std::runtime_error("the service has closed a stream of events");
      shared.event_bytes += static_cast<std::uint64_t>(bytes);
    }
  }
  shared.reached = 0;
}

void clients(const std::string& path, Shared& shared) {
  for (;;) {
    if (shared.wanted != 0) ask_and_follow(path, shared);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// ---- Cores ----

cpu_set_t last_core() {
  cpu_set_t cores, last;
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) throw SystemError("sched_getaffinity", errno);
  int core = CPU_SETSIZE - 1;
  while (!CPU_ISSET(core, &cores)) --core;
  CPU_ZERO(&last);
  CPU_SET(core, &last);
  return last;
}

/// Its children, which exist already, stay where they are.
void move_threads(pid_t process, const cpu_set_t& cores) {
  for (const auto& thread : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", process)))
    if (sched_setaffinity(std::stoi(thread.path().filename()), sizeof cores, &cores) != 0)
      throw SystemError("sched_setaffinity", errno);
}

// ---- What a process takes ----

double field_of(pid_t pid, const std::string& name) {
  std::ifstream file(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(name)) return std::stod(line.substr(name.size()));
  throw std::runtime_error("the service has ended");
}

/// Seconds of processor time of all its threads.
double processor_s(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text{std::istreambuf_iterator<char>(file), {}};
  std::istringstream words(text.substr(text.rfind(')') + 1));
  std::string word;
  for (int i = 0; i < 11; ++i) words >> word;
  double user = 0, system = 0;
  words >> user >> system;
  return (user + system) / double(sysconf(_SC_CLK_TCK));
}

// ---- The host ----

struct Part {
  std::vector<double> step_ms;
  double processor_s = 0, wall_s = 0;
};

void step_for(Manager& manager, double seconds, pid_t service, Part& part) {
  const auto begin_ns = base::now_ns();
  const auto processor = processor_s(service);
  const auto until = base::Deadline::in_seconds(seconds);
  while (!until.passed()) {
    const auto before_ns = base::now_ns();
    const auto result = manager.step({.accumulate = false});
    if (!result.counted) throw std::runtime_error(result.error);
    part.step_ms.push_back(double(base::now_ns() - before_ns) / 1e6);
  }
  part.processor_s += processor_s(service) - processor;
  part.wall_s += double(base::now_ns() - begin_ns) / 1e9;
}

void set_clients(Shared& shared, int wanted) {
  shared.wanted = wanted;
  const auto until = base::Deadline::in_seconds(60);
  while (shared.reached != wanted) {
    if (until.passed()) throw std::runtime_error("the clients do not begin");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void report(const std::string& name, Part part) {
  std::ranges::sort(part.step_ms);
  const auto at = [&](double share) {
    return part.step_ms[static_cast<std::size_t>(share * double(part.step_ms.size() - 1))];
  };
  bench::emit(name, "mlp, 0.5M parameters", "median", at(0.5), "ms");
  bench::emit(name, "mlp, 0.5M parameters", "p99", at(0.99), "ms");
  bench::emit(name, "mlp, 0.5M parameters", "processor", 100 * part.processor_s / part.wall_s, "%");
}

void measure(const std::string& socket, pid_t service, Shared& shared, bool quick) {
  auto manager = Manager::attach(socket);
  const int turns = quick ? 2 : 10;
  const double turn_s = quick ? 0.5 : 2;
  Part warm, alone, loaded;
  set_clients(shared, 1);
  step_for(manager, 2 * turn_s, service, warm);
  set_clients(shared, 0);
  const auto memory = field_of(service, "RssAnon:");
  const auto answers = shared.answers.load();
  for (int turn = 0; turn < turns; ++turn) {
    step_for(manager, turn_s, service, alone);
    set_clients(shared, 1);
    step_for(manager, turn_s, service, loaded);
    set_clients(shared, 0);
  }
  const auto in_case = "mlp, 0.5M parameters";
  bench::emit("loaded", in_case, "requests", double(shared.answers - answers) / loaded.wall_s, "1/s");
  bench::emit("loaded", in_case, "errors", double(shared.errors.load()), "requests");
  bench::emit("loaded", in_case, "growth", (field_of(service, "RssAnon:") - memory) / 1024, "MiB");
  report("alone", std::move(alone));
  report("loaded", std::move(loaded));
}

}  // namespace

int main(int argc, char** argv) {
  init(argc, argv);
  const bool quick = bench::parse_quick(argc, argv);
  return bench::exit_code_of([quick] {
    const auto folder = std::filesystem::temp_directory_path() / fmt::format("accelmgr-bench-{}", getpid());
    std::filesystem::create_directory(folder);
    std::filesystem::permissions(folder, std::filesystem::perms::owner_all);
    const auto socket = (folder / "socket").string();
    auto& shared = *bench::share<Shared>();
    const auto spare = last_core();
    const bench::Pin pin(0, 1);
    int ready[2];
    if (pipe2(ready, O_CLOEXEC) != 0) throw SystemError("pipe2", errno);
    const auto service = bench::fork_worker([&] {
      service::serve(mlp(), {.socket = socket}, [&](const std::string&) {
        if (write(ready[1], "1", 1) != 1) throw SystemError("write", errno);
      });
    });
    close(ready[1]);
    char byte;
    if (read(ready[0], &byte, 1) != 1) throw std::runtime_error("the service has not begun");
    move_threads(service, spare);
    const auto asking = bench::fork_worker([&] {
      move_threads(getpid(), spare);
      clients(socket, shared);
    });
    measure(socket, service, shared, quick);
    kill(asking, SIGKILL);
    kill(service, SIGTERM);
    waitpid(service, nullptr, 0);
    std::filesystem::remove_all(folder);
  });
}
