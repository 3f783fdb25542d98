// The input is what a client sends over a connection, in two parts. The server must answer in HTTP, never
// with an error of its own, and have nothing left to do when the client has gone.
#include <sys/socket.h>
#include <sys/un.h>

#include <boost/asio/io_context.hpp>
#include <nlohmann/json.hpp>

#include "engine/service/http_server.hpp"
#include "engine/service/query.hpp"
#include "fuzz_target.hpp"

using namespace accelmgr;
using namespace accelmgr::service;

namespace {

/// Reads the parameters as the handlers of a service do.
void answer(const Request& request, const Respond& respond) {
  if (request.path == "/v1/events")
    return respond(
        {.body = "first\n", .stream = [](const auto& client) { client.lock()->send("second\n"); }});
  using enum Parameter::Type;
  check_query(request, {{"since", integer, ""}, {"limit", integer, "", 1, 256}, {"at", position, ""}});
  const auto body = checked_body(
      request, {{"count", integer, "", 1, 1000}, {"accumulate", flag, ""}, {"timeout_s", number, "", 0, 10}});
  respond(json_response({{"path", request.path}, {"header", request.header}, {"body", body}}));
}

/// The text that a server sends to a client that sends `first`, then `rest`, then nothing more.
std::string answers_to(std::string_view first, std::string_view rest) {
  base::UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  base::UniqueFd client(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  auto* const at = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof address;  // The kernel chooses a name.
  fuzz::expect(bind(listener.get(), at, sizeof address.sun_family) == 0 && listen(listener.get(), 1) == 0 &&
                   getsockname(listener.get(), at, &size) == 0 && connect(client.get(), at, size) == 0,
               "a client is connected");
  boost::asio::io_context loop;
  std::string text(4096, 0);
  std::size_t length = 0;
  {
    const HttpServer server(loop, std::move(listener), Access{}, {}, answer);
    send(client.get(), first.data(), first.size(), MSG_NOSIGNAL);
    loop.poll();
    send(client.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    shutdown(client.get(), SHUT_WR);
    for (ssize_t count = 1; loop.poll() > 0 || count > 0; text.resize(length + 4096)) {
      count = recv(client.get(), text.data() + length, text.size() - length, 0);
      length += static_cast<std::size_t>(std::max<ssize_t>(count, 0));
    }
  }
  client.reset();
  loop.run();  // Ends, because nothing is left to do.
  text.resize(length);
  return text;
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto input = fuzz::text_of(data, size);
  const auto text = answers_to(input.substr(0, size / 2), input.substr(size / 2));
  fuzz::expect(text.empty() || text.starts_with("HTTP/1.1 "), "the answer is HTTP", text);
  fuzz::expect(!text.starts_with("HTTP/1.1 5") && text.find("\nHTTP/1.1 5") == std::string::npos,
               "the input is at fault", text);
  return 0;
}
