// accelmgr config show | check | reference
#include <fmt/core.h>

#include "base/ipc/cores.hpp"
#include "commands.hpp"
#include "standard_output.hpp"

namespace accelmgr::program {

CLI::Option* add_text_option(CLI::App& command, const std::string& names,
                             std::function<void(const std::string&)> take, const std::string& help) {
  return command
      .add_option(names, CLI::callback_t([take = std::move(take)](const CLI::results_t& words) {
                    take(words.back());
                    return true;
                  }),
                  help)
      ->trigger_on_parse()
      ->take_last();
}

CLI::Option* add_key_option(CLI::App& command, ConfigArguments& arguments, const std::string& name,
                            const std::string& key, const std::string& help) {
  const auto flag = name.substr(0, name.find(','));
  arguments.flags.emplace(key, flag);
  const auto take = [&arguments, key, flag](const std::string& value) {
    arguments.settings.push_back({.assignment = key + "=" + value, .flag = flag});
  };
  return add_text_option(command, name, take, fmt::format("{} ({})", help, key));
}

void add_config_options(CLI::App& command, ConfigArguments& arguments, bool file_required) {
  auto* file =
      command.add_option("--config,-c", arguments.file, "Configuration file (YAML)")->type_name("FILE");
  file->take_last();
  if (file_required) file->required();
  const auto take = [&arguments](const std::string& value) { arguments.settings.push_back({value}); };
  add_text_option(command, "--set", take,
                  "One value, stronger than the file: --set optimizer.learning_rate=1e-3; may be repeated")
      ->type_name("KEY=VALUE");
}

config::LoadedConfig load(const ConfigArguments& arguments) {
  return config::load_config(arguments.file, arguments.settings, config::accelmgr_environment(),
                             arguments.flags);
}

void add_config(CLI::App& app, Action& action) {
  auto* config = app.add_subcommand("config", "Shows or checks a configuration, or lists every option");
  config->require_subcommand(0, 1);  // 0: misunderstood() writes a better error than the parser.
  auto arguments = std::make_shared<ConfigArguments>();

  auto* show = config->add_subcommand("show", "Prints every value and where it comes from");
  add_config_options(*show, *arguments, false);
  show->callback([arguments, &action] {
    action = [arguments] {
      print_out(config::show(load(*arguments)));
      return exit_done;
    };
  });

  auto* check = config->add_subcommand("check", "Says whether a configuration can be used");
  add_config_options(*check, *arguments, true);
  check->callback([arguments, &action] {
    action = [arguments] {
      const auto loaded = load(*arguments);
      for (const auto& warning : config::warnings(loaded.config, ipc::allowed_cores()))
        fmt::print(stderr, "warning: {}\n", warning);
      print_out(fmt::format("{}: ok\n", arguments->file));
      return exit_done;
    };
  });

  auto* reference =
      config->add_subcommand("reference", "Lists every option with its type, default and meaning");
  reference->callback([&action] {
    action = [] {
      print_out(config::reference());
      return exit_done;
    };
  });
}

}  // namespace accelmgr::program
