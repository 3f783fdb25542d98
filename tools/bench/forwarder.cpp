// Carries packets between network namespaces as slow links do: `tools/bench/run swarm` needs links, and not
// every kernel can slow down its own.
//
//   bench_forwarder MBIT ONE_WAY_MS LOSS_PERCENT QUEUE_MS SEED NAMESPACE...
//
// NAMESPACE is a path such as /proc/PID/ns/net; the first one has the address 10.78.0.1, the second
// one 10.78.0.2. In each this program makes the device link0, and says "ready" once it has. A packet goes up
// its sender's link, and down that of its receiver. Each of these carries MBIT megabits a second, takes a
// quarter of the time there and back, loses LOSS_PERCENT of its packets at random, and those that would wait
// longer than QUEUE_MS. Every 200 ms a line says which bytes the links have carried so far. It ends when
// standard input does.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr std::size_t most_bytes = 65536;
constexpr std::size_t header_bytes = 20;  // Of IPv4 without options.
constexpr auto report_every = std::chrono::milliseconds(200);
constexpr auto rest = std::chrono::microseconds(500);  // What comes and what is due within it goes together.

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

struct Packet {
  Clock::time_point arrives;
  std::size_t to;
  std::vector<char> bytes;
};

struct Quality {
  double bits_per_ns;
  nanoseconds delay, longest_queue;
  double loss;
};

// One direction of a link.
class Lane {
 public:
  explicit Lane(const Quality& quality) : quality_(quality) {}

  void take(Packet packet, Clock::time_point now, std::mt19937_64& random) {
    const auto begins = std::max(now, free_at_);
    if (begins - now > quality_.longest_queue) {
      ++dropped;
      return;
    }
    const auto bits = 8.0 * static_cast<double>(packet.bytes.size());
    free_at_ = begins + nanoseconds(static_cast<std::int64_t>(bits / quality_.bits_per_ns));
    bytes += packet.bytes.size();
    if (std::uniform_real_distribution<double>()(random) < quality_.loss) {
      ++lost;
      return;
    }
    packet.arrives = free_at_ + quality_.delay;
    under_way_.push_back(std::move(packet));
  }

  bool has_arrived(Clock::time_point now) const {
    return !under_way_.empty() && under_way_.front().arrives <= now;
  }

  Packet give() {
    Packet packet = std::move(under_way_.front());
    under_way_.pop_front();
    return packet;
  }

  Clock::time_point next() const {
    return under_way_.empty() ? Clock::time_point::max() : under_way_.front().arrives;
  }

  std::uint64_t bytes = 0, lost = 0, dropped = 0;

 private:
  Quality quality_;
  Clock::time_point free_at_;
  std::deque<Packet> under_way_;
};

// The device link0 of a namespace: what is sent there is read from the descriptor.
int make_device(const char* path) {
  const int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  const int there = open(path, O_RDONLY | O_CLOEXEC);
  if (home < 0 || there < 0) fail(path);
  if (setns(there, CLONE_NEWNET) != 0) fail(std::string("setns ") + path);
  const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (device < 0) fail("/dev/net/tun");
  ifreq request{};
  std::strcpy(request.ifr_name, "link0");
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  if (ioctl(device, TUNSETIFF, &request) != 0) fail("TUNSETIFF");
  if (setns(home, CLONE_NEWNET) != 0) fail("setns");
  close(home);
  close(there);
  return device;
}

class Forwarder {
 public:
  Forwarder(const Quality& quality, std::uint64_t seed, const std::vector<const char*>& namespaces)
      : random_(seed), ups_(namespaces.size(), Lane(quality)), downs_(namespaces.size(), Lane(quality)) {
    for (const char* each : namespaces) devices_.push_back(make_device(each));
  }

  void run() {
    std::vector<pollfd> waited;
    for (const int device : devices_) waited.push_back({device, POLLIN, 0});
    waited.push_back({STDIN_FILENO, POLLIN, 0});
    auto reports = Clock::now();
    while (waited.back().revents == 0) {
      const auto now = Clock::now();
      for (std::size_t index = 0; index < devices_.size(); ++index) {
        if ((waited[index].revents & POLLIN) != 0) receive(index);
        for (Lane& up = ups_[index]; up.has_arrived(now);) {
          Packet packet = up.give();
          Lane& down = downs_[packet.to];
          const auto arrived = packet.arrives;
          down.take(std::move(packet), arrived, random_);
        }
      }
      for (std::size_t index = 0; index < devices_.size(); ++index)
        while (downs_[index].has_arrived(now)) {
          const Packet packet = downs_[index].give();
          (void)!write(devices_[index], packet.bytes.data(), packet.bytes.size());  // Down: it is lost.
        }
      if (now >= reports) {
        report(now);
        reports = now + report_every;
      }
      wait(waited, reports);
    }
  }

 private:
  void receive(std::size_t from) {
    for (;;) {
      const auto length = read(devices_[from], buffer_.data(), buffer_.size());
      if (length < static_cast<ssize_t>(header_bytes)) return;
      const auto to = static_cast<std::size_t>(static_cast<unsigned char>(buffer_[header_bytes - 1])) - 1;
      const bool is_ipv4 = (buffer_[0] & 0xf0) == 0x40;
      if (!is_ipv4 || to >= devices_.size()) continue;
      ups_[from].take({{}, to, {buffer_.data(), buffer_.data() + length}}, Clock::now(), random_);
    }
  }

  void wait(std::vector<pollfd>& waited, Clock::time_point until) {
    std::this_thread::sleep_for(rest);
    for (const auto* lanes : {&ups_, &downs_})
      for (const Lane& lane : *lanes) until = std::min(until, lane.next());
    const auto left = std::max<nanoseconds>(nanoseconds::zero(), until - Clock::now()).count();
    const timespec time{left / 1'000'000'000, left % 1'000'000'000};
    if (ppoll(waited.data(), waited.size(), &time, nullptr) < 0 && errno != EINTR) fail("ppoll");
  }

  void report(Clock::time_point now) const {
    std::printf("{\"at\": %.3f", std::chrono::duration<double>(now.time_since_epoch()).count());
    for (const auto& [name, lanes] : {std::pair{"up", &ups_}, std::pair{"down", &downs_}}) {
      std::printf(", \"%s\": [", name);
      for (const Lane& lane : *lanes)
        std::printf("%s%llu", &lane == lanes->data() ? "" : ", ",
                    static_cast<unsigned long long>(lane.bytes));
      std::printf("]");
    }
    unsigned long long lost = 0, dropped = 0;
    for (const auto* lanes : {&ups_, &downs_})
      for (const Lane& lane : *lanes) lost += lane.lost, dropped += lane.dropped;
    std::printf(", \"lost\": %llu, \"dropped\": %llu}\n", lost, dropped);
    std::fflush(stdout);
  }

  std::mt19937_64 random_;
  std::vector<int> devices_;
  std::vector<Lane> ups_, downs_;
  std::array<char, most_bytes> buffer_{};
};

int run(int count, char** arguments) {
  if (count < 7) {
    std::fputs("bench_forwarder MBIT ONE_WAY_MS LOSS_PERCENT QUEUE_MS SEED NAMESPACE...\n", stderr);
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto number = [&](int index) { return std::strtod(arguments[index], nullptr); };
  const auto milliseconds = [](double ms) { return nanoseconds(static_cast<std::int64_t>(1e6 * ms)); };
  // A packet takes two lanes.
  const Quality quality{number(1) / 1e3, milliseconds(number(2) / 2), milliseconds(number(4)),
                        number(3) / 100};
  Forwarder forwarder(quality, std::strtoull(arguments[5], nullptr, 10), {arguments + 6, arguments + count});
  std::puts("ready");
  std::fflush(stdout);
  forwarder.run();
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    return run(count, arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_forwarder: %s\n", error.what());
    return 1;
  }
}
