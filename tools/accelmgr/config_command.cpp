// accelmgr config show | check | reference
#include <fmt/core.h>

#include <thread>

#include "commands.hpp"
#include "config/loader.hpp"

namespace accelmgr::program {

void add_config_options(CLI::App& command, ConfigArguments& arguments, bool file_required) {
  auto* file = command.add_option("--config,-c", arguments.file, "Configuration file (YAML)");
  if (file_required) file->required();
  command
      .add_option("--set", arguments.sets,
                  "One value, stronger than the file: --set optimizer.learning_rate=1e-3; may be repeated")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
}

void add_config(CLI::App& app, Action& action) {
  auto* config = app.add_subcommand("config", "Shows or checks a configuration, or lists every option");
  config->require_subcommand(1);
  auto arguments = std::make_shared<ConfigArguments>();

  auto* show = config->add_subcommand("show", "Prints every value and where it comes from");
  add_config_options(*show, *arguments, false);
  show->callback([arguments, &action] {
    action = [arguments] {
      fmt::print("{}", config::show(config::load_config(arguments->file, arguments->sets,
                                                        config::accelmgr_environment())));
      return exit_done;
    };
  });

  auto* check = config->add_subcommand("check", "Says whether a configuration can be used");
  add_config_options(*check, *arguments, true);
  check->callback([arguments, &action] {
    action = [arguments] {
      const auto loaded =
          config::load_config(arguments->file, arguments->sets, config::accelmgr_environment());
      for (const auto& warning :
           config::warnings(loaded.config, static_cast<int>(std::thread::hardware_concurrency())))
        fmt::print(stderr, "warning: {}\n", warning);
      fmt::print("{}: ok\n", arguments->file);
      return exit_done;
    };
  });

  auto* reference =
      config->add_subcommand("reference", "Lists every option with its type, default and meaning");
  reference->callback([&action] {
    action = [] {
      fmt::print("{}", config::reference());
      return exit_done;
    };
  });
}

}  // namespace accelmgr::program
