// accelmgr top: a live view of a service
#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdint>
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
#include "top_view.hpp"

namespace accelmgr::program {
namespace {

using nlohmann::json;

struct TopArguments {
  std::string socket;
  double interval_s = 1;
  int count = 0;
  bool as_json = false;
};

/// While it lives, the terminal shows the view alone, without a cursor.
class Screen {
 public:
  explicit Screen(bool used) : used_(used) {
    if (used_) print_out("\x1b[?1049h\x1b[?25l");
  }
  ~Screen() {
    if (used_) print_out("\x1b[?25h\x1b[?1049l");
  }
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  void show(const TopView& view) const {
    winsize size{};
    if (!used_ || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0)
      size = {.ws_row = 0, .ws_col = 100, .ws_xpixel = 0, .ws_ypixel = 0};
    std::string text = used_ ? "\x1b[H" : "";
    std::size_t row = 0;
    for (const auto& line : view.lines(size.ws_col)) {
      if (used_ && size.ws_row > 0 && ++row >= size.ws_row) break;
      text += line + (used_ ? "\x1b[K\r\n" : "\n");
    }
    print_out(text + (used_ ? "\x1b[J" : "\n"));
  }

 private:
  bool used_;
};

json answer_to(client::ServiceSocket& connection, const std::string& target) {
  const auto answer =
      connection.ask("GET", target, "", "", base::Deadline::in_seconds(timing::first_words_s));
  if (answer.status != 200) throw SessionError(client::error_text(answer));
  return json::parse(answer.body);
}

int top(const TopArguments& arguments) {
  const auto path = client::socket_path(arguments.socket);
  Interruptible wait;
  auto connection = client::ServiceSocket::connect(path, base::Deadline::in_seconds(timing::connect_s));
  TopView view;
  std::string why;
  {
    const Screen screen(isatty(STDOUT_FILENO) == 1 && !arguments.as_json);
    for (int shown = 0; !wait.interrupted() && (arguments.count == 0 || shown < arguments.count); ++shown) {
      if (shown > 0) wait.wait(static_cast<std::int64_t>(arguments.interval_s * 1e9));
      if (wait.interrupted()) break;
      try {
        const auto status = answer_to(connection, "/v1/status");
        const auto steps = answer_to(connection, fmt::format("/v1/steps?since={}", view.since()));
        view.take(status, steps);
        if (arguments.as_json)
          print_out(json{{"status", status}, {"steps", steps["steps"]}}.dump() + "\n");
        else
          screen.show(view);
      } catch (const SessionError& error) {
        if (!wait.interrupted()) why = error.what();
        break;
      }
    }
  }
  if (!why.empty()) fmt::print(stderr, "accelmgr: {}\n", why);
  return why.empty() ? exit_done : exit_failed;
}

}  // namespace

void add_top(CLI::App& app, Action& action) {
  auto arguments = std::make_shared<TopArguments>();
  auto* command = app.add_subcommand("top", "Shows what a service does, until Ctrl-C");
  add_socket_option(*command, arguments->socket);
  command->add_option("--interval", arguments->interval_s, "Seconds between two views (1)")
      ->take_last()
      ->check(CLI::Range(0.05, 3600.0))
      ->type_name("SECONDS");
  command->add_option("--count", arguments->count, "How many views (0: until Ctrl-C)")
      ->take_last()
      ->check(CLI::NonNegativeNumber)
      ->type_name("N");
  command->add_flag("--json", arguments->as_json, "Prints each view as one line of JSON");
  command->callback([arguments, &action] { action = [arguments] { return top(*arguments); }; });
}

}  // namespace accelmgr::program
