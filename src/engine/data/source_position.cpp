#include "engine/data/source_position.hpp"

#include <fmt/format.h>

#include <sstream>

#include "accelmgr/errors.hpp"
#include "base/parse_number.hpp"

namespace accelmgr::data {
namespace {

// A state may be any text; errors quote at most this much of it.
constexpr std::size_t shown_bytes = 200;

std::string shown(const std::string& state) {
  return state.size() <= shown_bytes ? state : state.substr(0, shown_bytes) + "...";
}

/// Reads `name=number` from the text and returns the number.
std::uint64_t take_number(std::istream& text, const std::string& name, const std::string& state) {
  std::string word;
  text >> word;
  const auto prefix = name + "=";
  const auto number = word.starts_with(prefix)
                          ? base::parse_number<std::uint64_t>(std::string_view(word).substr(prefix.size()))
                          : std::nullopt;
  if (!number)
    throw DataError(fmt::format("'{}' is not the state of a data source: expected {}=NUMBER, found '{}'",
                                shown(state), name, shown(word)));
  return *number;
}

}  // namespace

std::string write_position(const std::string& kind, const Identity& identity, SourcePosition at) {
  std::string text = kind;
  for (const auto& [name, number] : identity) text += fmt::format(" {}={}", name, number);
  return text + fmt::format(" epoch={} position={}", at.epoch, at.position);
}

SourcePosition read_position(const std::string& state, const std::string& kind, const Identity& identity,
                             std::uint64_t epochs) {
  std::istringstream text(state);
  std::string word;
  text >> word;
  if (word != kind)
    throw DataError(fmt::format("the state '{}' is not that of a {} source", shown(state), kind));
  for (const auto& [name, number] : identity) {
    const auto found = take_number(text, name, state);
    if (found != number)
      throw DataError(fmt::format("the state is of a {} source whose {} is {}; here it is {}", kind, name,
                                  found, number));
  }
  const SourcePosition at{.epoch = take_number(text, "epoch", state),
                          .position = take_number(text, "position", state)};
  if (write_position(kind, identity, at) != state)
    throw DataError(fmt::format("'{}' is not the state of a data source: expected '{}'", shown(state),
                                write_position(kind, identity, at)));
  if (epochs > 0 && at.epoch >= epochs)
    throw DataError(
        fmt::format("the state is of epoch {} (from 0); here there are {} epochs", at.epoch, epochs));
  return at;
}

void check_position(SourcePosition at, std::uint64_t epoch_elements) {
  if (at.position > epoch_elements)
    throw DataError(
        fmt::format("the state says that {} elements of epoch {} were given, but this epoch has {}: the data "
                    "have changed",
                    at.position, at.epoch, epoch_elements));
}

}  // namespace accelmgr::data
