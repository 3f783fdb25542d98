// The connection of a client to the socket of a service, which speaks HTTP.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/clock.hpp"
#include "base/ipc/process.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::client {

/// The answer of a service to one request.
struct ServiceAnswer {
  int status = 0;
  std::string body;
  base::UniqueFd fd;  ///< What came with status 101: a host's socket, or an observer's memory.
};

class ServiceSocket {
 public:
  /// Throws SessionError: the path is too long, nothing listens there, or the deadline has passed.
  /// This and the waits for an answer ask base::interrupted() every timing::look_ns, and throw SessionError
  /// when that returns true.
  static ServiceSocket connect(const std::string& path, base::Deadline deadline);

  /// Sends a request, and blocks for its answer. `head` has further lines of the header, each with its CRLF.
  /// Throws SessionError when there is no answer before the deadline, or one that is no HTTP.
  ServiceAnswer ask(const std::string& method, const std::string& target, const std::string& head,
                    const std::string& body, base::Deadline deadline);

  /// Sends a GET request whose answer goes on. Gives `take` each part of its body as it comes, and returns
  /// when the service ends it. An answer with another status than 200 is returned as by ask(); `take` gets
  /// nothing then. `deadline` is for the header. Throws as ask() does.
  ServiceAnswer follow(const std::string& target, const std::string& head, base::Deadline deadline,
                       const std::function<void(std::string_view)>& take);

  /// The process that listens there.
  const ipc::Child& service() const noexcept { return service_; }
  ipc::Child take_service() noexcept { return std::move(service_); }

 private:
  ServiceSocket(std::string path, base::UniqueFd fd, ipc::Child service)
      : path_(std::move(path)), fd_(std::move(fd)), service_(std::move(service)) {}
  /// What ends a wait for the socket.
  enum class Waited { ready, service_ended, deadline };
  Waited wait(short events, base::Deadline deadline) const;
  void send(std::string_view text, base::Deadline deadline);
  std::size_t receive(std::span<char> to, base::UniqueFd& passed, base::Deadline deadline);
  /// Sends a request, and reads the header of its answer into `header`. What came of the body is in the
  /// answer.
  ServiceAnswer begin(const std::string& method, const std::string& target, const std::string& head,
                      const std::string& body, std::string& header, base::Deadline deadline);
  void read_body(const std::string& header, ServiceAnswer& answer, base::Deadline deadline);

  std::string path_;
  base::UniqueFd fd_;
  ipc::Child service_;
};

/// The text of an error that a service answers with: its message, and its hint.
std::string error_text(const ServiceAnswer& answer);
/// Its code, for instance "host_drives"; empty if the body is no such error.
std::string error_code(const ServiceAnswer& answer);

}  // namespace accelmgr::client
