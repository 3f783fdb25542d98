#include "launcher/agent/report_file.hpp"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "accelmgr/errors.hpp"
#include "base/errno_text.hpp"
#include "base/unique_fd.hpp"
#include "base/utf8.hpp"

namespace accelmgr::agent {
namespace {

// How every report begins.
constexpr std::string_view signature = "{\n  \"accelmgr\": \"error report\"";

void check(bool succeeded, std::string_view call, const std::filesystem::path& object) {
  if (succeeded) return;
  const int code = errno;
  throw SystemError(fmt::format("{} {}", call, object.string()), code);
}

/// True if the file is a report of accelmgr; nullopt if it does not exist.
std::optional<bool> is_report(const std::filesystem::path& file) {
  const base::UniqueFd fd(open(file.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!fd && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  check(fd || !base::is_shortage(errno), "opening", file);
  std::string begin(signature.size(), '\0');
  return fd && read(fd.get(), begin.data(), begin.size()) == static_cast<ssize_t>(begin.size()) &&
         begin == signature;
}

void write_durably(int fd, const std::filesystem::path& file, std::string_view text) {
  while (!text.empty()) {
    const auto written = write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    check(written >= 0, "writing", file);
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  check(fsync(fd) == 0, "syncing", file);
}

/// The name of a report that is being written: this, and six characters that make it unique.
std::string name_while_written(const std::filesystem::path& folder) {
  return report_of(folder).string() + ".writing-";
}

/// Removes what writers have left that were killed. One that still writes holds a lock.
void remove_leftovers(const std::filesystem::path& folder) {
  const auto name = std::filesystem::path(name_while_written(folder)).filename().string();
  std::error_code unreadable;
  for (const auto& entry : std::filesystem::directory_iterator(folder.empty() ? "." : folder, unreadable)) {
    if (!entry.path().filename().string().starts_with(name)) continue;
    const base::UniqueFd fd(open(entry.path().c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (fd && flock(fd.get(), LOCK_EX | LOCK_NB) == 0) unlink(entry.path().c_str());
  }
}

mode_t permissions() noexcept {
  const auto mask = umask(0);
  umask(mask);
  return 0666 & ~mask;
}

/// Makes the folder's entries permanent, even after a loss of power.
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

std::string report_text(const nlohmann::ordered_json& object) {
  nlohmann::ordered_json report{{"accelmgr", "error report"}};
  report.update(object);
  return report.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::filesystem::path report_of(const std::filesystem::path& folder) {
  return folder / "accelmgr-error.json";
}

bool write_report(const std::filesystem::path& folder, std::string_view text) noexcept {
  try {
    const auto file = report_of(folder);
    if (!is_report(file).value_or(true))
      throw Error(fmt::format("{} is not a report of accelmgr and is left as it is", file.string()));
    remove_leftovers(folder);
    auto temporary = name_while_written(folder) + std::string(6, 'X');
    const base::UniqueFd fd(mkostemp(temporary.data(), O_CLOEXEC));
    check(static_cast<bool>(fd), "opening", temporary);
    flock(fd.get(), LOCK_EX | LOCK_NB);
    try {
      fchmod(fd.get(), permissions());
      write_durably(fd.get(), temporary, text);
      check(rename(temporary.c_str(), file.c_str()) == 0, "renaming", temporary);
    } catch (const std::exception&) {
      unlink(temporary.c_str());
      throw;
    }
    sync_folder(folder);
    return true;
  } catch (const std::exception& problem) {
    warn(problem, "the failure is reported on standard error only");
    return false;
  }
}

void remove_report(const std::filesystem::path& folder) noexcept {
  try {
    remove_leftovers(folder);
    const auto file = report_of(folder);
    if (is_report(file).value_or(false))
      check(unlink(file.c_str()) == 0 || errno == ENOENT, "removing", file);
  } catch (const std::exception& problem) {
    warn(problem, "its content is from an earlier run");
  }
}

}  // namespace accelmgr::agent
