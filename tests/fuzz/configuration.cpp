// The input is a configuration file. What is accepted can be shown, and is the same when it is written and
// read again.
#include <sys/mman.h>
#include <unistd.h>

#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"
#include "fuzz_target.hpp"

using namespace accelmgr;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int file = memfd_create("configuration", MFD_CLOEXEC);
  static const auto path = fmt::format("/proc/self/fd/{}", file);
  fuzz::expect(ftruncate(file, 0) == 0 && pwrite(file, data, size, 0) == static_cast<ssize_t>(size),
               "a file");
  try {
    const auto loaded = config::load_config(path, {}, {});
    const auto again = config::to_yaml(loaded.config);
    fuzz::expect(config::from_yaml(again) == loaded.config, "what is written is read again", again);
    (void)config::show(loaded);
    (void)config::warnings(loaded.config, 2);
    (void)config::unread(loaded, {.model = true, .data = true});
  } catch (const ConfigError& error) {
    fuzz::expect(*error.what() != 0, "an error says what is wrong");
  }
  return 0;
}
