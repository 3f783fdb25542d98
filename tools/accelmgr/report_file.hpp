// What all reports of failures have in common: `error.json`, the times in it, and how texts are indented.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace accelmgr::program {

/// UTC, ISO 8601 with milliseconds.
std::string utc(double seconds_since_1970);
double seconds_since_1970();

/// `text` as UTF-8 without its last ends of line, with what follows its first line indented by `spaces`.
std::string hanging(std::string_view text, int spaces);

/// Writes `error.json` into `folder` (empty: the working directory): all of it or nothing, whatever ends this
/// process or the machine. The run has failed already: what keeps it from being written is a warning on
/// standard error. False then.
bool write_report(const std::filesystem::path& folder, std::string_view text) noexcept;

/// At the start of a run: an `error.json` there is that of an earlier one. What keeps it from being removed
/// is a warning on standard error.
void remove_report(const std::filesystem::path& folder) noexcept;

/// Where write_report() writes.
std::filesystem::path report_of(const std::filesystem::path& folder);

}  // namespace accelmgr::program
