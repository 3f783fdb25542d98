#include "collective/shm/mailbox.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/timing.hpp"
#include "ipc/spin.hpp"

namespace accelmgr::collective::shm {
namespace {

// Waits until ready(), the number of bytes that can be moved, is not 0. Sender and receiver wait for
// different words.
template <class Ready>
std::size_t wait(Group& group, Parking& parking, int member, const std::string& call, Patience& patience,
                 Ready ready) {
  std::size_t spun = 0;
  if (ipc::spin([&] { return (spun = ready()) != 0; }, group.spin_us() * 1000LL)) return spun;
  const auto deadline = patience.deadline();
  for (bool closer = false;;) {
    Parked parked(parking);
    if (const auto bytes = ready()) return bytes;
    try {
      group.look_after(
          member, closer, [&] { return ready() == 0; }, call, patience);
    } catch (const CollectiveError&) {
      if (const auto bytes = ready()) return bytes;  // The peer's last bytes before it failed.
      throw;
    }
    closer = !parked.wait(std::min(timing::look_ns, deadline.remaining_ns()));
  }
}

class Sender {
 public:
  Sender(Group& group, int to, Patience& patience)
      : group_(group),
        to_(to),
        patience_(patience),
        box_(group.mailbox(group.me(), to)),
        call_(fmt::format("send to rank {}", group.world_ranks()[static_cast<std::size_t>(to)])) {
    group.check_process(call_);
    group.look_after(
        to, false, [] { return true; }, call_, patience);
  }

  void write(const void* bytes, std::size_t count) {
    const auto* from = static_cast<const std::byte*>(bytes);
    while (count > 0) {
      const auto written = box_.written.load(std::memory_order_relaxed);
      const auto room = wait(group_, box_.drained, to_, call_, patience_, [&] {
        return Mailbox::ring_bytes - (written - box_.read.load(std::memory_order_seq_cst));
      });
      const auto at = written % Mailbox::ring_bytes;
      const auto part = std::min({count, room, Mailbox::ring_bytes - at});
      std::memcpy(box_.ring + at, from, part);
      box_.written.exchange(written + part, std::memory_order_seq_cst);
      wake_parked(box_.filled);
      from += part;
      count -= part;
    }
  }

 private:
  Group& group_;
  int to_;
  Patience& patience_;
  Mailbox& box_;
  std::string call_;
};

class Receiver {
 public:
  Receiver(Group& group, int from, Patience& patience)
      : group_(group),
        from_(from),
        patience_(patience),
        box_(group.mailbox(from, group.me())),
        call_(fmt::format("receive from rank {}", group.world_ranks()[static_cast<std::size_t>(from)])) {
    group.check_process(call_);
  }

  /// Like read(), but leaves the bytes to be read again. `count` must not exceed the ring.
  void peek(void* bytes, std::size_t count) {
    const auto read = box_.read.load(std::memory_order_relaxed);
    wait(group_, box_.filled, from_, call_, patience_,
         [&] { return std::size_t{box_.written.load(std::memory_order_seq_cst) - read >= count}; });
    const auto at = read % Mailbox::ring_bytes;
    const auto part = std::min(count, Mailbox::ring_bytes - at);
    auto* to = static_cast<std::byte*>(bytes);
    std::memcpy(to, box_.ring + at, part);
    std::memcpy(to + part, box_.ring, count - part);
  }

  void read(void* bytes, std::size_t count) {
    auto* to = static_cast<std::byte*>(bytes);
    while (count > 0) {
      const auto read = box_.read.load(std::memory_order_relaxed);
      const auto there = wait(group_, box_.filled, from_, call_, patience_, [&] {
        return std::size_t{box_.written.load(std::memory_order_seq_cst) - read};
      });
      const auto at = read % Mailbox::ring_bytes;
      const auto part = std::min({count, there, Mailbox::ring_bytes - at});
      std::memcpy(to, box_.ring + at, part);
      box_.read.exchange(read + part, std::memory_order_seq_cst);
      wake_parked(box_.drained);
      to += part;
      count -= part;
    }
  }

 private:
  Group& group_;
  int from_;
  Patience& patience_;
  Mailbox& box_;
  std::string call_;
};

}  // namespace

void send(Group& group, std::string_view object, int to, Patience& patience) {
  Sender sender(group, to, patience);
  const std::uint64_t length = object.size();
  sender.write(&length, sizeof length);
  sender.write(object.data(), object.size());
}

std::string receive(Group& group, int from, Patience& patience) {
  Receiver receiver(group, from, patience);
  std::uint64_t length = 0;
  receiver.peek(&length, sizeof length);
  std::string object(length, '\0');
  receiver.read(&length, sizeof length);
  receiver.read(object.data(), object.size());
  return object;
}

}  // namespace accelmgr::collective::shm
