// Random malformed input for fuzz tests: bytes, JSON objects and descriptors that a broken, newer or foreign
// peer may send. A seed gives the same input in every run.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.hpp"

namespace accelmgr::test {

class Fuzzed {
 public:
  explicit Fuzzed(std::uint64_t seed) : random_(seed) {}

  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  bool one_in(std::uint64_t n) { return below(n) == 0; }

  std::string bytes(std::size_t most) {
    std::string bytes(below(most + 1), 0);
    for (auto& byte : bytes) byte = static_cast<char>(random_());
    return bytes;
  }

  /// A number at a boundary of a range, of a type or of a sum.
  std::uint64_t edge() {
    constexpr std::uint64_t edges[] = {
        0,          1,           2,          23,         24, 25,
        0x7f,       0x80,        0xffff,     0x7fffffff, 64, 0x80000000,
        0xffffffff, 0x100000000, 1ull << 47, 1ull << 62, 3,  0x7fffffffffffffff,
        ~0ull,      ~0ull - 1,   ~0ull - 63, 1ull << 63};
    return edges[below(std::size(edges))];
  }

  /// Returns `text` with one to three changes. Each flips a bit, writes a number over it, cuts off the end,
  /// inserts random bytes, or inserts a copy of a part.
  std::string mutated(std::string text) {
    for (auto changes = 1 + below(3); changes > 0; --changes) {
      const auto at = text.empty() ? 0 : below(text.size());
      switch (text.empty() ? 3 : below(5)) {
        case 0:
          text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
          break;
        case 1:
          overwrite(text.data() + at, text.size() - at);
          break;
        case 2:
          text.resize(at);
          break;
        case 3:
          text.insert(at, bytes(16));
          break;
        default:
          text.insert(at, text.substr(below(text.size()), below(32)));
      }
    }
    return text;
  }

  /// Makes one to three changes to the memory: each flips a bit or writes a number over it.
  void damage(std::byte* memory, std::size_t size) {
    for (auto changes = 1 + below(3); changes > 0; --changes) {
      const auto at = below(size);
      if (one_in(2))
        memory[at] ^= static_cast<std::byte>(1 << below(8));
      else
        overwrite(reinterpret_cast<char*>(memory) + at / 4 * 4, size - at / 4 * 4);
    }
  }

  /// Returns `object` with one to three changes, at any depth. Each replaces a value, removes an entry, or
  /// appends a copy of an entry to its list.
  nlohmann::json mutated(nlohmann::json object) {
    for (auto changes = 1 + below(3); changes > 0; --changes) change(object);
    return object;
  }

 private:
  void overwrite(char* to, std::size_t size) {
    const auto number = edge();
    std::memcpy(to, &number, std::min(size, std::size_t{1} << below(4)));
  }

  nlohmann::json odd() {
    switch (below(10)) {
      case 0:
        return nullptr;
      case 1:
        return one_in(2);
      case 2:
        return bytes(20);
      case 3:
        return "a\0b";
      case 4:
        return 1.5;
      case 5:
        return nlohmann::json::array({edge()});
      case 6:
        return nlohmann::json::object();
      case 7:
        return static_cast<std::int64_t>(edge());
      default:
        return edge();
    }
  }

  void change(nlohmann::json& value) {
    if (!value.is_structured() || value.empty() || one_in(20)) {
      value = odd();
      return;
    }
    auto at = std::next(value.begin(), static_cast<std::ptrdiff_t>(below(value.size())));
    if (one_in(12)) {
      value.erase(at);
    } else if (value.is_array() && one_in(8)) {
      const auto copy = *at;
      value.push_back(copy);
    } else {
      change(*at);
    }
  }

  std::mt19937_64 random_;
};

/// Opens up to `most` descriptors: of files that are not accelmgr's shared memory, and pidfds of this
/// process. All are valid, because the kernel refuses to send a number that is not a descriptor.
inline std::vector<base::UniqueFd> some_descriptors(Fuzzed& fuzzed, std::size_t most) {
  std::vector<base::UniqueFd> fds;
  for (auto count = fuzzed.below(most + 1); count > 0; --count) {
    constexpr const char* paths[] = {"/dev/null", "/dev/zero", "/proc/self/exe", "/"};
    const auto kind = fuzzed.below(std::size(paths) + 1);
    fds.emplace_back(kind < std::size(paths) ? open(paths[kind], O_RDONLY | O_CLOEXEC)
                                             : static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  }
  return fds;
}

/// Like ipc::send(), but without its checks: it also sends empty packets and packets that are too large, and
/// it never blocks.
inline bool send_raw(int socket, std::string_view bytes, const std::vector<base::UniqueFd>& fds = {}) {
  iovec data{.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  std::vector<int> numbers;
  for (const auto& fd : fds) numbers.push_back(fd.get());
  std::vector<std::max_align_t> control(CMSG_SPACE(numbers.size() * sizeof(int)) / sizeof(std::max_align_t) +
                                        1);
  if (!numbers.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(numbers.size() * sizeof(int));
    auto* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(numbers.size() * sizeof(int));
    std::memcpy(CMSG_DATA(part), numbers.data(), numbers.size() * sizeof(int));
  }
  return sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

/// The number of open descriptors of this process, including the one that lists them.
inline std::ptrdiff_t open_count() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

}  // namespace accelmgr::test
