// accelmgr status | step | events | checkpoint | resize | restart | stop: what asks a service over its socket
#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/timing.hpp"
#include "commands.hpp"
#include "engine/client/service_name.hpp"
#include "engine/client/service_socket.hpp"
#include "standard_output.hpp"

namespace accelmgr::program {
namespace {

using nlohmann::json;

struct AskArguments {
  std::string socket;
  bool as_json = false;
  int count = 1;
  bool overwrite = false;
  bool update = false;
  bool no_wait = false;
  double timeout_s = 0;
  std::string since;
  int runners = 0, rank = 0;
};

/// Asks, and prints the answer by `show`, or the body itself with --json. Errors go to standard error.
int ask(const AskArguments& arguments, const char* method, const char* target, const std::string& body,
        base::Deadline deadline, const std::function<std::string(const json&)>& show) {
  const auto path = client::socket_path(arguments.socket);
  auto connection = client::ServiceSocket::connect(path, base::Deadline::in_seconds(timing::connect_s));
  const auto answer = connection.ask(method, target, "Connection: close\r\n", body, deadline);
  const bool failed = answer.status >= 400;
  if (arguments.as_json)
    print_out(answer.body);
  else if (failed)
    fmt::print(stderr, "accelmgr: {}\n", client::error_text(answer));
  else
    print_out(show(json::parse(answer.body)));
  return failed ? exit_failed : exit_done;
}

std::string text_of(const json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

std::string named_line(const std::string& name, const std::string& value) {
  return fmt::format("{:<12} {}\n", name, value);
}

std::string runners_text(const json& runners) {
  std::string text;
  for (const auto& runner : runners)
    text +=
        named_line("runner " + text_of(runner["rank"]),
                   fmt::format("{}, pid {}, phase {}, {} samples", text_of(runner["state"]),
                               text_of(runner["pid"]), text_of(runner["phase"]), text_of(runner["samples"])));
  return text;
}

std::string status_text(const json& status) {
  std::string text;
  const auto line = [&](const char* name, const std::string& value) { text += named_line(name, value); };
  line("ready",
       status["ready"].get<bool>() ? "yes" : fmt::format("no: {}", text_of(status["why_not_ready"])));
  line("service", fmt::format("process {}, run {}, up {:.0f} s", text_of(status["pid"]),
                              text_of(status["run_id"]), status["uptime_s"].get<double>()));
  line("trains", fmt::format("model '{}' on data '{}'", text_of(status["model"]), text_of(status["data"])));
  const auto& host = status["host"];
  line("host", host.is_null()
                   ? std::string("none")
                   : fmt::format("{} (pid {}), lease {}{}", text_of(host["name"]), text_of(host["pid"]),
                                 text_of(host["lease"]), host["leaving"].get<bool>() ? ", leaving" : ""));
  if (!status["unfinished"].is_null()) line("unfinished", text_of(status["unfinished"]));
  line("steps", fmt::format("{} of {} attempts, {} samples", text_of(status["steps"]),
                            text_of(status["attempts"]), text_of(status["samples"])));
  line("losses",
       fmt::format("{}, {} replacements", text_of(status["losses"]), text_of(status["replacements"])));
  return text + runners_text(status["runners"]);
}

/// JSON has no NaN.
double number_in(const json& value) { return value.is_null() ? std::nan("") : value.get<double>(); }

std::string step_text(const json& step) {
  return fmt::format("step {}: loss {:.6g}, {} samples, {:.1f} ms\n", text_of(step["step"]),
                     number_in(step["loss"]), text_of(step["samples"]), step["step_ms"].get<double>());
}

std::string steps_text(const json& answer) {
  std::string text;
  for (const auto& step : answer["steps"]) text += step_text(step);
  return text;
}

std::string pending_text(const json& pending) {
  if (pending["count"] == 0) return "all steps were waited for\n";
  auto text = fmt::format("{} of {} steps are made{}\n", text_of(pending["made"]), text_of(pending["count"]),
                          pending["under_way"].get<bool>() ? ", the others go on" : "");
  return pending["error"].is_null() ? text : text + fmt::format("error: {}\n", text_of(pending["error"]));
}

std::string checkpoint_text(const json& written) {
  std::string text =
      fmt::format("step {}: {} ({:.1f} MiB, {:.0f} ms)\n", text_of(written["step"]), text_of(written["path"]),
                  written["bytes"].get<double>() / (1 << 20), written["write_ms"].get<double>());
  for (const auto& warning : written["warnings"]) text += fmt::format("warning: {}\n", text_of(warning));
  return text;
}

std::string incident_text(const json& incident) {
  const bool is_runner = incident["rank"].get<int>() >= 0;
  const auto what = text_of(incident["what"]);
  auto text = fmt::format("lost: {} (pid {}) {}",
                          is_runner ? "runner " + text_of(incident["rank"]) : "the fork server",
                          text_of(incident["pid"]), text_of(incident["exit"]));
  if (is_runner)
    text +=
        fmt::format(" in phase {} of attempt {}", text_of(incident["phase"]), text_of(incident["attempt"]));
  return text + (what.empty() ? "" : ": " + what) + "\n";
}

/// An event of a service on one line.
std::string event_text(const std::string& name, const json& data) {
  if (name == "step" && data["counted"].get<bool>()) return step_text(data);
  if (name == "step")
    return fmt::format("step {} does not count: {}, {:.1f} ms\n", data["step"].get<std::uint64_t>() + 1,
                       text_of(data["status"]), data["step_ms"].get<double>());
  if (name == "incident") return incident_text(data);
  if (name == "host" && data["host"].is_null()) return "host: none\n";
  if (name == "host")
    return fmt::format("host: {} (pid {}), lease {}\n", text_of(data["host"]["name"]),
                       text_of(data["host"]["pid"]), text_of(data["host"]["lease"]));
  return fmt::format("the service ends: {}\n", text_of(data["why"]));
}

/// Cuts server-sent events out of what comes.
class EventReader {
 public:
  struct Event {
    std::string id, name, data;
  };
  /// Returns the events that are complete.
  std::vector<Event> take(std::string_view part) {
    text_ += part;
    std::vector<Event> events;
    for (auto end = text_.find("\n\n"); end != std::string::npos; end = text_.find("\n\n")) {
      events.push_back(event_in(std::string_view(text_).substr(0, end)));
      text_.erase(0, end + 2);
    }
    return events;
  }

 private:
  static Event event_in(std::string_view lines) {
    Event event;
    while (!lines.empty()) {
      const auto line = lines.substr(0, lines.find('\n'));
      lines.remove_prefix(std::min(lines.size(), line.size() + 1));
      const auto take = [&](std::string_view field, std::string& value) {
        if (line.starts_with(field)) value = line.substr(field.size());
      };
      take("id: ", event.id);
      take("event: ", event.name);
      take("data: ", event.data);
    }
    return event;
  }
  std::string text_;
};

/// Prints events until the service ends.
int watch(const AskArguments& arguments) {
  const auto path = client::socket_path(arguments.socket);
  auto connection = client::ServiceSocket::connect(path, base::Deadline::in_seconds(timing::connect_s));
  EventReader reader;
  bool has_closed = false;
  const auto target = arguments.since.empty() ? "/v1/events" : "/v1/events?since=" + arguments.since;
  const auto answer = connection.follow(
      target, "", base::Deadline::in_seconds(timing::first_words_s), [&](std::string_view part) {
        for (const auto& event : reader.take(part)) {
          if (event.data.empty()) continue;  // A comment.
          const auto data = json::parse(event.data);
          has_closed = has_closed || event.name == "closing";
          print_out(arguments.as_json
                        ? json{{"event", event.name}, {"id", event.id}, {"data", data}}.dump() + "\n"
                        : event_text(event.name, data));
        }
      });
  if (answer.status != 200)
    fmt::print(stderr, "accelmgr: {}\n", client::error_text(answer));
  else if (!has_closed)
    fmt::print(stderr,
               "accelmgr: the service at '{}' was killed, or dropped this program, which did not read\n",
               path);
  return has_closed ? exit_done : exit_failed;
}

CLI::App* add(CLI::App& app, const char* name, const char* help,
              const std::shared_ptr<AskArguments>& arguments) {
  auto* command = app.add_subcommand(name, help);
  add_socket_option(*command, arguments->socket);
  command->add_flag("--json", arguments->as_json, "Prints the service's answer as JSON");
  return command;
}

/// A service that is not stopped answers within that time, also on a loaded machine.
constexpr double answer_s = 10;

base::Deadline soon() { return base::Deadline::in_seconds(answer_s); }

/// For requests that the service itself bounds, by `seconds` if the user has said so.
base::Deadline service_bounds(const AskArguments& arguments, std::optional<double> seconds) {
  if (seconds) return base::Deadline::in_seconds(*seconds + answer_s);
  const auto path = client::socket_path(arguments.socket);
  auto connection = client::ServiceSocket::connect(path, base::Deadline::in_seconds(timing::connect_s));
  connection.ask("GET", "/v1/status", "Connection: close\r\n", "", soon());  // Throws if it is stopped.
  return base::Deadline::in_seconds(1e9);
}

/// Prints all results that there are: an answer has some of them.
int list_pending(const AskArguments& arguments) {
  std::size_t known = 0;
  for (;;) {
    std::size_t told = 0;
    const auto show = [&](const json& pending) {
      told = pending["steps"].size();
      return steps_text(pending) + (told == 0 ? pending_text(pending) : "");
    };
    const auto target = fmt::format("/v1/pending?since={}", known);
    if (const int code = ask(arguments, "GET", target.c_str(), "", soon(), show);
        code != exit_done || told == 0)
      return code;
    known += told;
  }
}

/// What `accelmgr list` says of one service. Empty: none listens there any more.
std::optional<json> listed(const client::NamedSocket& socket) {
  json line{{"name", socket.name}, {"socket", socket.path}, {"status", nullptr}, {"why_no_status", nullptr}};
  std::optional<client::ServiceSocket> connection;
  try {
    connection = client::ServiceSocket::connect(socket.path, soon());
  } catch (const SessionError&) {
    return std::nullopt;
  }
  try {
    const auto answer = connection->ask("GET", "/v1/status", "Connection: close\r\n", "", soon());
    if (answer.status != 200) throw SessionError(client::error_text(answer));
    line["status"] = json::parse(answer.body);
  } catch (const SessionError& error) {
    line["why_no_status"] = error.what();
  }
  return line;
}

std::string listed_text(const json& listed) {
  const auto name = listed["name"] == "" ? std::string("-") : text_of(listed["name"]);
  const auto& status = listed["status"];
  if (status.is_null()) return fmt::format("{:<16} {}\n", name, text_of(listed["why_no_status"]));
  return fmt::format("{:<16} process {}, {} runners, {} steps, {}: {} on {}, host {}\n", name,
                     text_of(status["pid"]), status["runners"].size(), text_of(status["steps"]),
                     status["ready"].get<bool>() ? "ready" : text_of(status["why_not_ready"]),
                     text_of(status["model"]), text_of(status["data"]),
                     status["host"].is_null() ? "none" : text_of(status["host"]["name"]));
}

int list(bool as_json) {
  auto services = json::array();
  for (const auto& socket : client::named_sockets())
    if (auto found = listed(socket)) services.push_back(std::move(*found));
  if (as_json) {
    print_out(services.dump() + "\n");
    return exit_done;
  }
  for (const auto& service : services) print_out(listed_text(service));
  if (services.empty()) fmt::print(stderr, "accelmgr: no service of this user listens in XDG_RUNTIME_DIR\n");
  return exit_done;
}

}  // namespace

void add_socket_option(CLI::App& command, std::string& socket) {
  command
      .add_option("--socket", socket,
                  "Name of the session, or path of its Unix socket (default: $XDG_RUNTIME_DIR/accelmgr.sock)")
      ->take_last()
      ->type_name("NAME|PATH");
}

void add_service_commands(CLI::App& app, Action& action) {
  auto arguments = std::make_shared<AskArguments>();
  add(app, "status", "Says how a service is", arguments)->callback([arguments, &action] {
    action = [arguments] { return ask(*arguments, "GET", "/v1/status", "", soon(), status_text); };
  });

  auto list_as_json = std::make_shared<bool>(false);
  auto* listing =
      app.add_subcommand("list", "Lists the services of this user that have no path of their own");
  listing->add_flag("--json", *list_as_json, "Prints a list of JSON objects");
  listing->callback([list_as_json, &action] { action = [list_as_json] { return list(*list_as_json); }; });

  auto* step = add(app, "step", "Lets a service make steps that no host drives", arguments);
  step->add_option("--count", arguments->count, "Steps to make (1)")
      ->take_last()
      ->check(CLI::Range(1, 100'000))
      ->type_name("N");
  step->add_flag("--overwrite", arguments->overwrite, "Overwrites the gradients instead of adding to them");
  step->add_flag("--update", arguments->update,
                 "Updates the parameters, as the last host did with its optimizer in inner steps");
  step->add_option("--timeout", arguments->timeout_s, "Seconds for each step (step_timeout)")
      ->take_last()
      ->check(CLI::NonNegativeNumber)
      ->type_name("SECONDS");
  step->add_flag(
      "--no-wait", arguments->no_wait,
      "Returns when they have begun: `accelmgr pending` tells of them, `accelmgr cancel` ends them");
  step->callback([arguments, step, &action] {
    const bool has_timeout = step->count("--timeout") > 0;
    action = [arguments, has_timeout] {
      json body{
          {"count", arguments->count}, {"accumulate", !arguments->overwrite}, {"update", arguments->update}};
      if (has_timeout) body["timeout_s"] = arguments->timeout_s;
      body["wait"] = !arguments->no_wait;
      if (arguments->no_wait)
        return ask(*arguments, "POST", "/v1/step", body.dump(), soon(), [](const json& answer) {
          return fmt::format("{} steps have begun\n", text_of(answer["pending"]));
        });
      const auto most_s = has_timeout ? std::optional(arguments->count * arguments->timeout_s) : std::nullopt;
      return ask(*arguments, "POST", "/v1/step", body.dump(), service_bounds(*arguments, most_s), steps_text);
    };
  });

  add(app, "pending", "Lists the steps that a service makes, or has made, for which nobody waits", arguments)
      ->callback([arguments, &action] { action = [arguments] { return list_pending(*arguments); }; });
  add(app, "cancel", "Ends the steps that a service makes for which nobody waits, before the next one",
      arguments)
      ->callback([arguments, &action] {
        action = [arguments] {
          return ask(*arguments, "POST", "/v1/cancel", "", service_bounds(*arguments, std::nullopt),
                     pending_text);
        };
      });

  auto* events =
      add(app, "events", "Prints what happens in a service, a line for each event, until it ends", arguments);
  events
      ->add_option("--since", arguments->since,
                   "Begins after this step, or after the event with this id (now)")
      ->take_last()
      ->check(CLI::Validator(
          [](std::string& text) {
            return text.find_first_not_of("0123456789.") == std::string::npos
                       ? std::string()
                       : "must be a number, or an id as 17.2";
          },
          "N"))
      ->type_name("N");
  events->callback([arguments, &action] { action = [arguments] { return watch(*arguments); }; });

  auto* checkpoint =
      add(app, "checkpoint", "Lets a service write a checkpoint; a host that drives it adds its optimizer",
          arguments);
  checkpoint->add_option("--timeout", arguments->timeout_s, "Seconds until it must be written (60)")
      ->take_last()
      ->check(CLI::NonNegativeNumber)
      ->type_name("SECONDS");
  checkpoint->callback([arguments, checkpoint, &action] {
    const bool has_timeout = checkpoint->count("--timeout") > 0;
    action = [arguments, has_timeout] {
      constexpr double usual_s = 60;
      const auto body = has_timeout ? json{{"timeout_s", arguments->timeout_s}} : json::object();
      return ask(*arguments, "POST", "/v1/checkpoint", body.dump(),
                 service_bounds(*arguments, has_timeout ? arguments->timeout_s : usual_s), checkpoint_text);
    };
  });

  auto* resize =
      add(app, "resize", "Changes how many runners a service has, from its next step on", arguments);
  resize->add_option("runners", arguments->runners, "Runners, at most runners.max_runners of the service")
      ->required()
      ->check(CLI::PositiveNumber)
      ->type_name("N");
  resize->callback([arguments, &action] {
    action = [arguments] {
      return ask(*arguments, "POST", "/v1/resize", json{{"runners", arguments->runners}}.dump(), soon(),
                 [](const json& answer) { return runners_text(answer["runners"]); });
    };
  });

  auto* restart =
      add(app, "restart", "Replaces a runner of a service; a step that it leaves is tried again", arguments);
  restart->add_option("rank", arguments->rank, "Rank of the runner")
      ->required()
      ->check(CLI::NonNegativeNumber)
      ->type_name("RANK");
  restart->callback([arguments, &action] {
    action = [arguments] {
      const auto target = fmt::format("/v1/restart?rank={}", arguments->rank);
      return ask(*arguments, "POST", target.c_str(), "", soon(),
                 [](const json& answer) { return runners_text(answer["runners"]); });
    };
  });

  add(app, "stop", "Ends a service: it finishes its step, and writes a checkpoint", arguments)
      ->callback([arguments, &action] {
        action = [arguments] {
          return ask(*arguments, "POST", "/v1/stop", "", soon(),
                     [](const json&) { return std::string("the service is being stopped\n"); });
        };
      });
}

}  // namespace accelmgr::program
