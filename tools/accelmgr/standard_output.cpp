#include "standard_output.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "commands.hpp"

namespace accelmgr::program {
namespace {

int first_error = 0;

void flush() noexcept {
  if (std::fflush(stdout) != 0 && first_error == 0) first_error = errno;
}

}  // namespace

void print_out(std::string_view text) noexcept {
  if (first_error != 0) return;
  if (std::fwrite(text.data(), 1, text.size(), stdout) < text.size()) first_error = errno;
  flush();
}

int checked_output(int exit_code) noexcept {
  flush();
  if (first_error == 0 && std::ferror(stdout) != 0) first_error = EIO;  // A library's write failed.
  if (first_error == 0) return exit_code;
  std::fprintf(stderr, "accelmgr: standard output could not be written: %s\n", strerrordesc_np(first_error));
  return exit_code == exit_done ? exit_failed : exit_code;
}

}  // namespace accelmgr::program
