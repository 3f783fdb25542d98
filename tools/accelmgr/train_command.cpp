// accelmgr train
#include <fmt/core.h>

#include "base/ipc/cores.hpp"
#include "commands.hpp"
#include "file_limit.hpp"
#include "shipped_configuration.hpp"
#include "standard_output.hpp"
#include "trainer.hpp"

namespace accelmgr::program {
namespace {

struct TrainArguments {
  ConfigArguments config;
  TrainOptions run;
};

int train(const TrainArguments& arguments) {
  auto chosen = arguments.config;
  if (chosen.file.empty()) {
    chosen.file = shipped_configuration();
    const auto text = fmt::format("no --config: trains the shipped {}\n", chosen.file);
    if (arguments.run.log == "-")
      fmt::print(stderr, "{}", text);
    else
      print_out(text);
  }
  const auto loaded = load(chosen);
  for (const auto& warning : config::warnings(loaded.config, ipc::allowed_cores()))
    fmt::print(stderr, "accelmgr: warning: {}\n", warning);
  check_file_limit(16);
  return Trainer(loaded.config, arguments.run).run();
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("train", "Trains the configured model and prints how it goes");
  auto arguments = std::make_shared<TrainArguments>();
  add_config_options(*command, arguments->config, false);
  const auto option = [&](const std::string& name, const std::string& key, const std::string& help) {
    return add_key_option(*command, arguments->config, name, key, help);
  };
  option("--steps", "train.steps", "Steps to take")->type_name("N");
  option("--runners", "nprocs", "Runners, one per device")->type_name("N");
  command
      ->add_option("--log", arguments->run.log,
                   "File for one JSON object per step, and one for the run at its end; -: standard output")
      ->take_last()
      ->type_name("FILE.jsonl");
  option("--checkpoint-dir", "checkpoint.directory", "Folder for checkpoints; the last step always gets one")
      ->type_name("DIR");
  option("--checkpoint-every", "checkpoint.every", "Steps between checkpoints")->type_name("N");
  option("--keep", "checkpoint.keep", "Checkpoints to keep, besides the best")->type_name("N");
  option("--resume", "checkpoint.resume", "Goes on from a checkpoint: `latest` of the folder, or a path")
      ->type_name("latest|PATH");
  command->add_flag("--overwrite", arguments->run.overwrites,
                    "Starts a new run that replaces the log and the checkpoints of an earlier run");
  command
      ->add_option(
          "--checkpoint-fallback", arguments->run.checkpoint_fallback,
          "Folder for the last checkpoint when its own cannot be written (default: that of the log, or "
          "the working directory)")
      ->take_last()
      ->type_name("DIR");
  command->footer(
      "Ctrl-C finishes the step and stops everything (exit code 130); a second Ctrl-C kills it at once.\n"
      "`accelmgr config reference` lists the keys of --set.");
  command->callback([arguments, &action] { action = [arguments] { return train(*arguments); }; });
}

}  // namespace accelmgr::program
