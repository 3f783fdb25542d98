// Each line of the input is a setting as --set has it, or a variable of the environment: ACCELMGR_NPROCS=2.
#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"
#include "fuzz_target.hpp"

using namespace accelmgr;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<config::Setting> settings;
  std::map<std::string, std::string> environment;
  for (auto rest = fuzz::text_of(data, size); !rest.empty();) {
    auto line = fuzz::take_until(rest, '\n');
    if (!line.starts_with("ACCELMGR_")) {
      settings.push_back({.assignment = std::string(line)});
      continue;
    }
    const auto variable = fuzz::take_until(line, '=');
    environment.emplace(variable, line);
  }
  try {
    const auto loaded = config::load_config("", settings, environment);
    const auto again = config::to_yaml(loaded.config);
    fuzz::expect(config::from_yaml(again) == loaded.config, "what is written is read again", again);
    (void)config::show(loaded);
  } catch (const ConfigError& error) {
    fuzz::expect(*error.what() != 0, "an error says what is wrong");
  }
  return 0;
}
