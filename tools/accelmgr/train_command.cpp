// accelmgr train
#include <fmt/core.h>

#include <thread>

#include "commands.hpp"
#include "config/loader.hpp"
#include "shipped_configuration.hpp"
#include "trainer.hpp"

namespace accelmgr::program {
namespace {

struct TrainArguments {
  ConfigArguments config;
  std::optional<std::int64_t> steps;
  std::optional<int> runners;
  TrainOptions run;
  std::optional<std::string> checkpoint_directory, resume;
  std::optional<std::int64_t> checkpoint_every;
  std::optional<int> keep;
};

int train(const TrainArguments& arguments) {
  auto sets = arguments.config.sets;
  if (arguments.steps) sets.push_back(fmt::format("train.steps={}", *arguments.steps));
  if (arguments.runners) sets.push_back(fmt::format("nprocs={}", *arguments.runners));
  if (arguments.checkpoint_directory)
    sets.push_back(fmt::format("checkpoint.directory={}", *arguments.checkpoint_directory));
  if (arguments.checkpoint_every)
    sets.push_back(fmt::format("checkpoint.every={}", *arguments.checkpoint_every));
  if (arguments.keep) sets.push_back(fmt::format("checkpoint.keep={}", *arguments.keep));
  if (arguments.resume) sets.push_back(fmt::format("checkpoint.resume={}", *arguments.resume));
  auto file = arguments.config.file;
  if (file.empty()) {
    file = shipped_configuration();
    fmt::print(arguments.run.log == "-" ? stderr : stdout, "no --config: trains the shipped {}\n", file);
  }
  const auto loaded = config::load_config(file, sets, config::accelmgr_environment());
  for (const auto& warning :
       config::warnings(loaded.config, static_cast<int>(std::thread::hardware_concurrency())))
    fmt::print(stderr, "accelmgr: warning: {}\n", warning);
  return Trainer(loaded.config, arguments.run).run();
}

}  // namespace

void add_train(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("train", "Trains the configured model and prints how it goes");
  auto arguments = std::make_shared<TrainArguments>();
  add_config_options(*command, arguments->config, false);
  command->add_option("--steps", arguments->steps, "Steps to take (train.steps)");
  command->add_option("--runners", arguments->runners, "Runners, one per device (nprocs)");
  command
      ->add_option("--log", arguments->run.log,
                   "File for one JSON object per step, and one for the run at its end; -: standard output")
      ->type_name("FILE.jsonl");
  command
      ->add_option("--checkpoint-dir", arguments->checkpoint_directory,
                   "Folder for checkpoints (checkpoint.directory); the last step always gets one")
      ->type_name("DIR");
  command->add_option("--checkpoint-every", arguments->checkpoint_every,
                      "Steps between checkpoints (checkpoint.every)");
  command->add_option("--keep", arguments->keep, "Checkpoints to keep, besides the best (checkpoint.keep)");
  command
      ->add_option("--resume", arguments->resume,
                   "Goes on from a checkpoint: `latest` of the folder, or a path (checkpoint.resume)")
      ->type_name("latest|PATH");
  command->add_flag("--overwrite", arguments->run.overwrites,
                    "Begins anew where --log and --checkpoint-dir hold those of an earlier run, which go");
  command
      ->add_option(
          "--checkpoint-fallback", arguments->run.checkpoint_fallback,
          "Folder for the last checkpoint when its own cannot be written (default: that of the log, or "
          "the working directory)")
      ->type_name("DIR");
  command->footer(
      "Ctrl-C finishes the step and stops everything (exit code 130); a second Ctrl-C kills it at once.\n"
      "`accelmgr config reference` lists what --set takes.");
  command->callback([arguments, &action] { action = [arguments] { return train(*arguments); }; });
}

}  // namespace accelmgr::program
