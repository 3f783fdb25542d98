#include "report_file.hpp"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "accelmgr/errors.hpp"
#include "base/unique_fd.hpp"
#include "base/utf8.hpp"

namespace accelmgr::program {
namespace {

/// The name it has until it is whole.
std::filesystem::path unfinished(const std::filesystem::path& file) { return file.string() + ".tmp"; }

void check(bool succeeded, std::string_view call, const std::filesystem::path& object) {
  if (succeeded) return;
  const int code = errno;
  throw SystemError(fmt::format("{} {}", call, object.string()), code);
}

void write_durably(const std::filesystem::path& file, std::string_view text) {
  const base::UniqueFd fd(open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  check(static_cast<bool>(fd), "opening", file);
  while (!text.empty()) {
    const auto written = write(fd.get(), text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    check(written >= 0, "writing", file);
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  check(fsync(fd.get()) == 0, "syncing", file);
}

/// Its entries are as they are seen now, after a loss of power too.
void sync_folder(const std::filesystem::path& folder) {
  const auto name = folder.empty() ? std::filesystem::path(".") : folder;
  const base::UniqueFd fd(open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  check(fd && fsync(fd.get()) == 0, "syncing", name);
}

void warn(const std::exception& problem, std::string_view consequence) noexcept {
  std::fprintf(stderr, "accelmgr: warning: %s; %s\n", problem.what(), consequence.data());
}

}  // namespace

std::string utc(double seconds_since_1970) {
  const std::int64_t ms = std::llround(seconds_since_1970 * 1e3);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(static_cast<std::time_t>(ms / 1000)),
                     ms % 1000);
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string hanging(std::string_view text, int spaces) {
  while (text.ends_with('\n')) text.remove_suffix(1);
  std::string out;
  for (const char c : base::valid_utf8(text)) {
    out += c;
    if (c == '\n') out.append(static_cast<std::size_t>(spaces), ' ');
  }
  return out;
}

std::filesystem::path report_of(const std::filesystem::path& folder) { return folder / "error.json"; }

bool write_report(const std::filesystem::path& folder, std::string_view text) noexcept {
  try {
    const auto file = report_of(folder), temporary = unfinished(file);
    try {
      write_durably(temporary, text);
      check(rename(temporary.c_str(), file.c_str()) == 0, "renaming", temporary);
    } catch (const std::exception&) {
      unlink(temporary.c_str());
      throw;
    }
    sync_folder(folder);
    return true;
  } catch (const std::exception& problem) {
    warn(problem, "the failure may stand on standard error alone");
    return false;
  }
}

void remove_report(const std::filesystem::path& folder) noexcept {
  try {
    for (const auto& file : {report_of(folder), unfinished(report_of(folder))})
      check(unlink(file.c_str()) == 0 || errno == ENOENT || errno == ENOTDIR, "removing", file);
  } catch (const std::exception& problem) {
    warn(problem, "what it says is of an earlier run");
  }
}

}  // namespace accelmgr::program
