#include "engine/checkpoint/state_file.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <span>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "engine/checkpoint/checksum.hpp"
#include "engine/checkpoint/folder.hpp"
#include "engine/checkpoint/storage.hpp"

namespace accelmgr::checkpoint {
namespace {

using nlohmann::json;

constexpr const char* format_name = "accelmgr checkpoint";
// Larger files are refused: a state is small.
constexpr std::uint64_t largest_file = std::uint64_t{16} << 20;

[[noreturn]] void refuse(const std::string& where, const std::string& why) {
  throw CheckpointError(fmt::format("'{}' {}", where, why));
}

std::string checksum_of_state(const json& state) {
  const auto text = state.dump();
  return checksum_of(std::as_bytes(std::span(text)));
}

void check_size(const std::string& text) {
  if (text.size() > largest_file)
    throw CheckpointError(
        fmt::format("the state of a checkpoint takes {} bytes as JSON; at most {} are allowed", text.size(),
                    largest_file));
}

/// For a parser of JSON: throws where lists and objects are nested deeper than `most` levels, because
/// printing them uses the stack.
json::parser_callback_t refuse_deeper_than(int most, const std::string& what) {
  return [=](int depth, json::parse_event_t, const json&) {
    if (depth > most) throw CheckpointError(fmt::format("{} is nested deeper than {} levels", what, most));
    return true;
  };
}

void check_run(const json& run) {
  if (!run.is_object())
    throw CheckpointError(
        fmt::format("the state of a checkpoint must be a JSON object, not {}", run.type_name()));
  try {
    const auto text = run.dump();
    check_size(text);
    constexpr int most = base::max_nesting - 2;  // In the file `run` is two levels down.
    const auto again = json::parse(text, refuse_deeper_than(most, "the state of a checkpoint"));
    const auto changes = json::diff(run, again);
    if (changes.empty()) return;
    throw CheckpointError(
        fmt::format("the state of a checkpoint cannot be kept as JSON: {} would not be the same when read "
                    "back (numbers must be finite; bytes go through encode_base64)",
                    changes.front().at("path").get<std::string>()));
  } catch (const json::type_error& error) {
    throw CheckpointError(fmt::format("the state of a checkpoint cannot be kept as JSON: {}", error.what()));
  }
}

json seal_entry(const Seal& seal) { return {{"bytes", seal.bytes}, {"checksum", seal.checksum}}; }

Seal read_seal(const json& entry) {
  return {entry.at("bytes").get_ref<const std::uint64_t&>(), entry.at("checksum").get<std::string>()};
}

json parse_json(std::string_view text, const std::string& where) {
  if (text.empty()) refuse(where, "is torn: it is empty");
  try {
    return json::parse(text, refuse_deeper_than(base::max_nesting, fmt::format("'{}'", where)));
  } catch (const json::parse_error& error) {
    if (error.byte > text.size())
      refuse(where, fmt::format("is torn: its JSON is not complete after {} bytes", text.size()));
    refuse(where,
           fmt::format("is damaged or was not written by accelmgr: it is not JSON, at byte {}", error.byte));
  } catch (const json::out_of_range& error) {
    refuse(where, fmt::format("is damaged or was not written by accelmgr: {}", error.what()));
  }
}

State state_of(const json& entries) {
  State state;
  state.step = entries.at("step").get_ref<const std::uint64_t&>();
  if (const auto& metric = entries.at("metric"); !metric.is_null()) state.metric = metric.get<double>();
  state.model = read_seal(entries.at("files").at(model_file));
  state.training = read_seal(entries.at("files").at(training_file));
  state.run = entries.at("run");
  return state;
}

/// The text of state.json; `state.run` is not looked at.
std::string text_of(const State& state) {
  const bool has_metric = state.metric && std::isfinite(*state.metric);
  const json entries{
      {"format", format_name},
      {"version", format_version},
      {"step", state.step},
      {"metric", has_metric ? json(*state.metric) : json()},
      {"files", {{model_file, seal_entry(state.model)}, {training_file, seal_entry(state.training)}}},
      {"run", state.run}};
  return json{{"checksum", checksum_of_state(entries)}, {"state", entries}}.dump(1) + '\n';
}

}  // namespace

std::string print_state(const State& state) {
  check_run(state.run);
  auto text = text_of(state);
  check_size(text);
  return text;
}

// One comparison finds whatever is wrong: the text must be what this program writes for what it has read.
State parse_state(std::string_view text, const std::string& where) {
  const auto document = parse_json(text, where);
  std::string why = "its checksum, or a byte of it, is not that of its content";
  try {
    const auto& entries = document.at("state");
    if (const auto& version = entries.at("version"); version.is_number_unsigned() && version > format_version)
      refuse(where, fmt::format("is of the newer format version {}; this program knows versions up to {}",
                                version.get<std::uint64_t>(), format_version));
    auto state = state_of(entries);
    if (state.run.is_object() && text_of(state) == text) return state;
  } catch (const json::exception& error) {
    why = error.what();
  }
  refuse(where, fmt::format("is damaged or was not written by accelmgr: {}", why));
}

State read_state(int folder, const std::string& path) {
  const auto where = (std::filesystem::path(path) / state_file).string();
  return read_state_file(open_regular_file(folder, state_file, where).get(), where);
}

State read_state_file(int fd, const std::string& where) {
  const auto bytes = file_bytes(fd, where);
  if (bytes > largest_file)
    refuse(where, fmt::format("was not written by accelmgr: it has {} bytes; accelmgr writes at most {}",
                              bytes, largest_file));
  std::string text(bytes, '\0');
  for (std::size_t at = 0; at < text.size();) {
    const auto count = pread(fd, text.data() + at, text.size() - at, static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw SystemError(fmt::format("reading '{}'", where), errno);
    if (count == 0) text.resize(at);
    at += static_cast<std::size_t>(count);
  }
  return parse_state(text, where);
}

}  // namespace accelmgr::checkpoint
