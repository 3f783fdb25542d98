// accelmgr trace: what the processes of a service did, as a file for Perfetto
#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/timing.hpp"
#include "commands.hpp"
#include "engine/client/service_name.hpp"
#include "engine/client/service_socket.hpp"
#include "interruptible.hpp"
#include "standard_output.hpp"
#include "trace_file.hpp"

namespace accelmgr::program {
namespace {

/// A runner that makes a step in 0.1 ms writes over its oldest spans after 25 ms.
constexpr std::int64_t poll_ns = 20'000'000;
constexpr double longest_trace_s = 86'400;

struct TraceArguments {
  std::string socket;
  double seconds = 0;
  std::string file = "trace.json";
};

class TraceClient {
 public:
  TraceClient(client::ServiceSocket connection, TraceFile& trace)
      : connection_(std::move(connection)), trace_(trace) {}
  /// Fetches the spans after the position that was reached, in as many answers as it takes.
  void fetch() {
    while (fetch_once()) {
    }
  }
  /// From now on only what comes later.
  void skip() { position_ = "now"; }

 private:
  bool fetch_once() {
    const auto target = position_.empty() ? "/v1/trace" : "/v1/trace?since=" + position_;
    const auto answer =
        connection_.ask("GET", target, "", "", base::Deadline::in_seconds(timing::first_words_s));
    if (answer.status != 200) throw SessionError(client::error_text(answer));
    const auto body = nlohmann::json::parse(answer.body, nullptr, /*allow_exceptions=*/false);
    trace_.add(body);  // Checks it.
    position_ = body.value("next", "");
    return body.value("more", false);
  }

  client::ServiceSocket connection_;
  TraceFile& trace_;
  std::string position_;
};

/// Why the service told no more before the time was over; empty otherwise.
std::string follow(TraceClient& client, double seconds, Interruptible& wait) {
  try {
    const auto deadline = base::Deadline::in_seconds(seconds);
    do {
      wait.wait(std::clamp<std::int64_t>(deadline.remaining_ns(), 0, poll_ns));
      client.fetch();
    } while (!deadline.passed() && !wait.interrupted());
  } catch (const SessionError& error) {
    return wait.interrupted() ? "" : error.what();
  }
  return {};
}

int trace(const TraceArguments& arguments, bool has_seconds) {
  const auto path = client::socket_path(arguments.socket);
  Interruptible wait;
  TraceFile trace;
  TraceClient client(client::ServiceSocket::connect(path, base::Deadline::in_seconds(timing::connect_s)),
                     trace);
  if (has_seconds) client.skip();
  client.fetch();
  std::ofstream file(arguments.file, std::ios::binary);  // Before the wait, which would be in vain.
  if (!file) throw SystemError(fmt::format("writing {}", arguments.file), errno);
  const auto why = has_seconds ? follow(client, arguments.seconds, wait) : std::string();
  trace.write(file);
  file.close();
  if (!file) throw SystemError(fmt::format("writing {}", arguments.file), errno);
  print_out(fmt::format("{}: {} spans of {} processes; https://ui.perfetto.dev opens it\n", arguments.file,
                        trace.spans(), trace.processes()));
  if (trace.overwritten() > 0)
    fmt::print(stderr, "accelmgr: {} more spans were written over before they could be read\n",
               trace.overwritten());
  if (!why.empty()) fmt::print(stderr, "accelmgr: the trace ends early: {}\n", why);
  if (wait.interrupted()) return exit_interrupted;
  return why.empty() ? exit_done : exit_failed;
}

}  // namespace

void add_trace(CLI::App& app, Action& action) {
  auto arguments = std::make_shared<TraceArguments>();
  auto* command =
      app.add_subcommand("trace", "Writes what each process of a service did when, as a file for Perfetto");
  add_socket_option(*command, arguments->socket);
  command
      ->add_option("--seconds", arguments->seconds,
                   "How long to look from now on; without it, what the service still knows is written")
      ->take_last()
      ->check(CLI::Range(0.0, longest_trace_s))
      ->type_name("N");
  command->add_option("-o,--output", arguments->file, "File to write (trace.json)")
      ->take_last()
      ->type_name("FILE");
  command->callback([arguments, command, &action] {
    const bool has_seconds = command->count("--seconds") > 0;
    action = [arguments, has_seconds] { return trace(*arguments, has_seconds); };
  });
}

}  // namespace accelmgr::program
