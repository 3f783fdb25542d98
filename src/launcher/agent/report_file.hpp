// The common parts of failure reports: the file, times and indentation.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace accelmgr::agent {

/// UTC, ISO 8601 with milliseconds.
std::string utc(double seconds_since_1970);
double seconds_since_1970();

/// `text` as UTF-8 without trailing line ends; lines after the first are indented by `spaces`.
std::string hanging(std::string_view text, int spaces);

/// The JSON of `object`, with a first entry that identifies a report of accelmgr.
std::string report_text(const nlohmann::ordered_json& object);

/// The file of write_report(): `accelmgr-error.json` in `folder` (empty: the working directory).
std::filesystem::path report_of(const std::filesystem::path& folder);

/// Writes a report_text() atomically: the file is complete or absent, even if the machine crashes. Does not
/// replace a file that is not a report of accelmgr. An error is only a warning on standard error, because the
/// run has failed already; the result is then false. Removes what writers have left that were killed.
bool write_report(const std::filesystem::path& folder, std::string_view text) noexcept;

/// Removes the report of an earlier run and unfinished ones, when a run starts. A file that is not a report
/// of accelmgr stays. An error is only a warning on standard error.
void remove_report(const std::filesystem::path& folder) noexcept;

}  // namespace accelmgr::agent
