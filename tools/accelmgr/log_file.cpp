#include "log_file.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "accelmgr/errors.hpp"

namespace accelmgr::program {
namespace {

using nlohmann::json;

std::ifstream open_log(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw SystemError(fmt::format("reading {}", file), errno);
  return stream;
}

/// The fields of a log line that are needed here. RunLog writes the lines.
struct Line {
  std::int64_t step = 0;  ///< In the line for the end of the run: the steps of the run.
  bool counted = false;
  bool ends_run = false;
  std::string run_id;  ///< Empty: an earlier version wrote the line.
};

/// nullopt if the text is not a line of a log.
std::optional<Line> parse_line(const std::string& text) {
  const auto line = json::parse(text, nullptr, /*allow_exceptions=*/false);
  try {
    if (line.contains("run")) {
      const auto& run = line.at("run");
      return Line{run.at("steps"), false, true, run.value("run_id", "")};
    }
    return Line{line.at("step"), line.at("counted"), false, line.value("run_id", "")};
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

}  // namespace

bool is_log(const std::string& file) {
  auto stream = open_log(file);
  std::string line;
  std::getline(stream, line);
  if (!stream.eof()) return parse_line(line).has_value();
  return line.starts_with(R"({"step":)") || line.starts_with(R"({"run":)");  // An incomplete line.
}

Kept kept_of_log(const std::string& file, const std::string& run_id, std::int64_t steps) {
  auto stream = open_log(file);
  Kept kept;
  std::string text;
  for (std::int64_t number = 1; std::getline(stream, text) && !stream.eof(); ++number) {
    const auto line = parse_line(text);
    if (!line && stream.peek() == std::ifstream::traits_type::eof()) break;  // The machine crashed.
    if (!line) throw ConfigError(fmt::format("line {} was not written by `accelmgr train`", number));
    if (line->counted && !line->run_id.empty() && line->run_id != run_id)
      throw ConfigError(
          fmt::format("it is the log of another run ({}; this one is {})", line->run_id, run_id));
    if (line->step > steps) break;
    kept.bytes = stream.tellg();
    kept.last_step = line->step;
    kept.ended = line->ends_run;
  }
  return kept;
}

}  // namespace accelmgr::program
