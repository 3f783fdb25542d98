// accelmgr status | step | stop: what asks a service over its socket
#include <fmt/core.h>
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/timing.hpp"
#include "client/service_socket.hpp"
#include "commands.hpp"
#include "service/socket_path.hpp"
#include "standard_output.hpp"

namespace accelmgr::program {
namespace {

using nlohmann::json;

struct AskArguments {
  std::string socket;
  bool as_json = false;
  int count = 1;
  bool overwrite = false;
  double timeout_s = 0;
};

std::string socket_of(const AskArguments& arguments) {
  auto path = arguments.socket.empty() ? service::default_socket_path() : arguments.socket;
  if (path.empty()) throw ConfigError("--socket is missing, and XDG_RUNTIME_DIR is not set", "--socket");
  return path;
}

/// Asks, and prints the answer by `show`, or the body itself with --json. Errors go to standard error.
int ask(const AskArguments& arguments, const char* method, const char* target, const std::string& body,
        base::Deadline deadline, const std::function<std::string(const json&)>& show) {
  const auto path = socket_of(arguments);
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

std::string status_text(const json& status) {
  std::string text;
  const auto line = [&](const char* name, const std::string& value) {
    text += fmt::format("{:<12} {}\n", name, value);
  };
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
  for (const auto& runner : status["runners"])
    line(fmt::format("runner {}", text_of(runner["rank"])).c_str(),
         fmt::format("{}, pid {}, phase {}, {} samples", text_of(runner["state"]), text_of(runner["pid"]),
                     text_of(runner["phase"]), text_of(runner["samples"])));
  return text;
}

/// JSON has no NaN.
double number_in(const json& value) { return value.is_null() ? std::nan("") : value.get<double>(); }

std::string steps_text(const json& answer) {
  std::string text;
  for (const auto& step : answer["steps"])
    text += fmt::format("step {}: loss {:.6g}, {} samples, {:.1f} ms\n", text_of(step["step"]),
                        number_in(step["loss"]), text_of(step["samples"]), step["step_ms"].get<double>());
  return text;
}

CLI::App* add(CLI::App& app, const char* name, const char* help,
              const std::shared_ptr<AskArguments>& arguments) {
  auto* command = app.add_subcommand(name, help);
  command
      ->add_option("--socket", arguments->socket,
                   "Unix socket of the service (default: $XDG_RUNTIME_DIR/accelmgr.sock)")
      ->take_last()
      ->type_name("PATH");
  command->add_flag("--json", arguments->as_json, "Prints the service's answer as JSON");
  return command;
}

base::Deadline soon() { return base::Deadline::in_seconds(timing::first_words_s); }

}  // namespace

void add_service_commands(CLI::App& app, Action& action) {
  auto arguments = std::make_shared<AskArguments>();
  add(app, "status", "Says how a service is", arguments)->callback([arguments, &action] {
    action = [arguments] { return ask(*arguments, "GET", "/v1/status", "", soon(), status_text); };
  });

  auto* step = add(app, "step", "Lets a service make steps that no host drives", arguments);
  step->add_option("--count", arguments->count, "Steps to make (1)")
      ->take_last()
      ->check(CLI::Range(1, 1000))
      ->type_name("N");
  step->add_flag("--overwrite", arguments->overwrite, "Overwrites the gradients instead of adding to them");
  step->add_option("--timeout", arguments->timeout_s, "Seconds for each step (step_timeout)")
      ->take_last()
      ->check(CLI::NonNegativeNumber)
      ->type_name("SECONDS");
  step->callback([arguments, step, &action] {
    const bool has_timeout = step->count("--timeout") > 0;
    action = [arguments, has_timeout] {
      json body{{"count", arguments->count}, {"accumulate", !arguments->overwrite}};
      if (has_timeout) body["timeout_s"] = arguments->timeout_s;
      const auto patience = base::Deadline::in_seconds(1e9);  // The service bounds each step.
      return ask(*arguments, "POST", "/v1/step", body.dump(), patience, steps_text);
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
