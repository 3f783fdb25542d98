#include "engine/client/service_socket.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "accelmgr/errors.hpp"
#include "base/ipc/process.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::client {
namespace {

base::Deadline soon() { return base::Deadline::in_seconds(60); }

/// A service that takes one connection, says `text` there and is killed, while a child that it has forked
/// holds the connection.
class KilledService {
 public:
  explicit KilledService(const std::string& text)
      : process_(ipc::fork_self([&] {
          const int connection = accept(listen_at(path()), nullptr, nullptr);
          if (fork() == 0) {
            alarm(120);
            for (;;) pause();
          }
          if (write(connection, text.data(), text.size()) < 0) _exit(1);
          kill(getpid(), SIGKILL);
        })) {}
  ~KilledService() { ipc::end_group(process_, base::Deadline::at_ns(0)); }
  KilledService(const KilledService&) = delete;
  KilledService& operator=(const KilledService&) = delete;

  std::string path() const { return folder_ / "socket"; }
  ServiceSocket connect() const {
    for (;;) {
      try {
        return ServiceSocket::connect(path(), soon());
      } catch (const SessionError&) {
        if (ipc::has_ended(process_.pidfd.get())) throw;  // Else it does not listen yet.
      }
    }
  }

 private:
  static int listen_at(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 || listen(fd, 1) != 0)
      _exit(1);
    return fd;
  }

  test::TemporaryFolder folder_;
  ipc::Child process_;
};

TEST(ServiceSocket, EndsWhatItFollowsWhenTheServiceIsKilledWhileItsChildHoldsTheConnection) {
  const KilledService service("HTTP/1.1 200 OK\r\n\r\ndata: last words\n\n");
  std::string heard;
  service.connect().follow("/v1/events", "", soon(), [&](std::string_view part) { heard += part; });
  EXPECT_EQ(heard, "data: last words\n\n");
}

TEST(ServiceSocket, DoesNotWaitForTheAnswerOfAKilledService) {
  const KilledService service("HTTP/1.1 200 OK\r\n");
  const auto begin = base::now_ns();
  EXPECT_THROW(service.connect().ask("GET", "/v1/status", "", "", soon()), SessionError);
  EXPECT_LT(base::now_ns() - begin, std::int64_t{30'000'000'000});
}

}  // namespace
}  // namespace accelmgr::client
