// Exits with 0 if the configuration refuses the key `faults`, as a build without tests must.
#include <iostream>

#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"

int main() {
  const std::vector<accelmgr::config::Setting> sets{{"faults=rank=0 phase=forward fault=kill"}};
  try {
    accelmgr::config::load_config("", sets, {});
  } catch (const accelmgr::ConfigError& error) {
    std::cout << error.what() << '\n';
    return std::string(error.what()).find("unknown key 'faults'") == std::string::npos;
  }
  std::cout << "the key faults is known\n";
  return 1;
}
