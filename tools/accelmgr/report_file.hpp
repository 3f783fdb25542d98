// What all reports of failures have in common: the file, the times in it, and how texts are indented.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace accelmgr::program {

/// UTC, ISO 8601 with milliseconds.
std::string utc(double seconds_since_1970);
double seconds_since_1970();

/// `text` as UTF-8 without its last ends of line, with what follows its first line indented by `spaces`.
std::string hanging(std::string_view text, int spaces);

/// An object of JSON as a report: `object` behind a first entry by which a report of accelmgr's is known.
std::string report_text(const nlohmann::ordered_json& object);

/// Where write_report() writes: `accelmgr-error.json` in `folder` (empty: the working directory).
std::filesystem::path report_of(const std::filesystem::path& folder);

/// Writes a report_text(): all of it or nothing, whatever ends this process or the machine. A file of that
/// name which is no report of accelmgr's stays as it is. The run has failed already: what keeps the report
/// from being written is a warning on standard error. False then.
bool write_report(const std::filesystem::path& folder, std::string_view text) noexcept;

/// At the start of a run: a report there is that of an earlier one. Other files stay. What keeps it from
/// being removed is a warning on standard error.
void remove_report(const std::filesystem::path& folder) noexcept;

}  // namespace accelmgr::program
