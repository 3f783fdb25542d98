// accelmgr serve
#include <fmt/core.h>
#include <grp.h>

#include <cerrno>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/ipc/cores.hpp"
#include "commands.hpp"
#include "engine/client/service_name.hpp"
#include "engine/service/service.hpp"
#include "file_limit.hpp"
#include "python.hpp"
#include "standard_output.hpp"

namespace accelmgr::program {
namespace {

struct ServeArguments {
  ConfigArguments config;
  service::ServeOptions options;
  std::string group;
};

gid_t group_named(const std::string& name) {
  const auto* found = getgrnam(name.c_str());
  if (found == nullptr)
    throw ConfigError(fmt::format("--group '{}': there is no such group", name), "--group");
  return found->gr_gid;
}

[[noreturn]] void serve(const ServeArguments& arguments) {
  auto options = arguments.options;
  options.socket = client::socket_path(options.socket);
  if (options.http.empty() != options.token_file.empty())
    throw ConfigError(
        "--http and --token-file are for each other: a TCP port is served only to those who state a token",
        options.http.empty() ? "--token-file" : "--http");
  if (!arguments.group.empty()) options.group = group_named(arguments.group);
  const auto loaded = load(arguments.config);
  for (const auto& warning : config::warnings(loaded.config, ipc::allowed_cores()))
    fmt::print(stderr, "accelmgr: warning: {}\n", warning);
  check_file_limit(16);
  if (is_of_python(loaded.config)) {
    std::vector<std::string> words{config::to_yaml(loaded.config),
                                   options.socket,
                                   options.group ? std::to_string(*options.group) : "",
                                   options.http,
                                   options.token_file,
                                   std::to_string(options.stop_timeout_s),
                                   arguments.config.file};
    for (const auto& setting : arguments.config.settings) words.push_back(setting.assignment);
    execute_python_service(words);
  }
  options.file = arguments.config.file;
  options.settings = arguments.config.settings;
  service::serve(loaded.config, options, [](const std::string& line) { print_out(line + "\n"); });
}

}  // namespace

void add_serve(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "serve", "Owns a session and its runners; hosts attach to it, and `accelmgr status` and others ask it");
  auto arguments = std::make_shared<ServeArguments>();
  add_config_options(*command, arguments->config, true);
  add_socket_option(*command, arguments->options.socket);
  command->add_option("--group", arguments->group, "A group whose members may use the service too")
      ->take_last()
      ->type_name("NAME");
  command
      ->add_option(
          "--http", arguments->options.http,
          "TCP address to listen at too, for clients that state the token (none); :PORT is 127.0.0.1")
      ->take_last()
      ->type_name("HOST:PORT");
  command
      ->add_option("--token-file", arguments->options.token_file,
                   "File with the token of --http; only its owner may read it")
      ->take_last()
      ->type_name("FILE");
  command
      ->add_option("--stop-timeout", arguments->options.stop_timeout_s,
                   "Seconds for the step under way and the last checkpoint when the service ends (20)")
      ->take_last()
      ->check(CLI::NonNegativeNumber)
      ->type_name("SECONDS");
  command->footer(
      "Runs in the foreground, prints a line when it is ready, and tells systemd (sd_notify). SIGTERM and "
      "Ctrl-C\n"
      "finish the step under way, write a checkpoint if checkpoint.directory is set and no host drives the\n"
      "session, and end everything; a second one ends it at once.");
  command->callback([arguments, &action] { action = [arguments]() -> int { serve(*arguments); }; });
}

}  // namespace accelmgr::program
