#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <sstream>

#include "accelmgr/errors.hpp"
#include "base/did_you_mean.hpp"
#include "engine/faults/plan.hpp"

namespace accelmgr::faults {
namespace {

using Names = std::vector<std::string>;

const Names keys{"rank", "step", "phase", "occurrence", "generation", "probability", "seed", "fault"};
constexpr int last_rank = 23;                             // The highest rank that Config::nprocs allows.
constexpr auto phase_of_nan = base::FaultPhase::forward;  // Only this phase looks at FaultEffect::nan.
constexpr std::uint32_t longest_delay_ms = 3'600'000;
constexpr std::string_view actions_in_words =
    "kill, stop, exit:CODE, exception[:TEXT], hang, nan or slow:MILLISECONDS";

const std::map<std::string, Action>& actions() {
  static const std::map<std::string, Action> all{{"kill", Action::kill}, {"stop", Action::stop},
                                                 {"exit", Action::exit}, {"exception", Action::exception},
                                                 {"hang", Action::hang}, {"nan", Action::nan},
                                                 {"slow", Action::slow}};
  return all;
}

Names phase_names() {
  Names names;
  for (const auto phase : phases) names.emplace_back(name_of(phase));
  return names;
}

template <class T>
std::optional<T> number_in(std::string_view text, T min, T max) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  // The comparison is negated so that it rejects NaN too.
  if (error != std::errc{} || end != text.data() + text.size() || !(value >= min && value <= max))
    return std::nullopt;
  return value;
}

/// Reads one fault, word by word.
class Parser {
 public:
  explicit Parser(const std::string& text);
  Fault fault() const;

 private:
  const std::string* find(const std::string& key) const;
  const std::string& required(const std::string& key) const;
  [[noreturn]] void refuse(const std::string& what) const;
  [[noreturn]] void refuse_value(const std::string& key, std::string_view allowed, const Names& names) const;
  template <class T>
  T number(const std::string& key, T min, T max, std::string_view allowed, const Names& names) const;

  std::optional<int> rank() const;
  std::optional<std::uint64_t> step() const;
  std::optional<base::FaultPhase> phase() const;
  std::optional<std::uint32_t> generation(std::optional<int> rank) const;
  void read_frequency(Fault& fault) const;
  void read_action(Fault& fault) const;
  void check_phase(Fault& fault) const;

  std::string text_;
  std::map<std::string, std::string> values_;
};

Parser::Parser(const std::string& text) : text_(text) {
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const auto sign = word.find('=');
    const auto key = word.substr(0, sign);
    if (sign == std::string::npos)
      refuse(fmt::format("'{}' has no value; it must be KEY=VALUE, where KEY is {}", word,
                         fmt::join(keys, ", ")));
    if (std::ranges::find(keys, key) == keys.end())
      refuse(fmt::format("unknown key '{}'; the keys are {}{}", key, fmt::join(keys, ", "),
                         base::did_you_mean(key, keys)));
    if (!values_.emplace(key, word.substr(sign + 1)).second) refuse(fmt::format("{} is given twice", key));
  }
}

Fault Parser::fault() const {
  Fault fault;
  fault.text = text_;
  fault.rank = rank();
  fault.phase = phase();
  fault.step = step();
  fault.generation = generation(fault.rank);
  read_frequency(fault);
  read_action(fault);
  check_phase(fault);
  return fault;
}

const std::string* Parser::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

const std::string& Parser::required(const std::string& key) const {
  const auto* value = find(key);
  if (value == nullptr) refuse(fmt::format("{} is missing; a fault has rank, phase and fault", key));
  return *value;
}

void Parser::refuse(const std::string& what) const {
  throw ConfigError(fmt::format("faults: '{}': {}", text_, what), "faults");
}

void Parser::refuse_value(const std::string& key, std::string_view allowed, const Names& names) const {
  const auto& value = *find(key);
  refuse(fmt::format("{} is '{}'; it must be {}{}", key, value, allowed,
                     base::did_you_mean(std::string_view(value).substr(0, value.find(':')), names)));
}

template <class T>
T Parser::number(const std::string& key, T min, T max, std::string_view allowed, const Names& names) const {
  const auto value = number_in<T>(*find(key), min, max);
  if (!value) refuse_value(key, allowed, names);
  return *value;
}

std::optional<int> Parser::rank() const {
  const auto& value = required("rank");
  if (value == "any") return std::nullopt;
  if (value == "manager") return manager_rank;
  return number<int>("rank", 0, last_rank, fmt::format("a number from 0 to {}, manager or any", last_rank),
                     {"manager", "any"});
}

std::optional<std::uint64_t> Parser::step() const {
  const auto* value = find("step");
  if (value == nullptr || *value == "any") return std::nullopt;
  return number<std::uint64_t>("step", 1, std::numeric_limits<std::uint64_t>::max(),
                               "a number from 1, or any", {"any"});
}

std::optional<base::FaultPhase> Parser::phase() const {
  const auto& value = required("phase");
  if (value == "any") return std::nullopt;
  for (const auto phase : phases)
    if (value == name_of(phase)) return phase;
  auto names = phase_names();
  names.emplace_back("any");
  refuse_value("phase", fmt::format("{}", fmt::join(names, " or ")), names);
}

std::optional<std::uint32_t> Parser::generation(std::optional<int> rank) const {
  const auto* value = find("generation");
  const std::uint32_t first = rank == manager_rank ? 0 : 1;
  if (value == nullptr) return first;
  if (*value == "any") return std::nullopt;
  return number<std::uint32_t>("generation", first, std::numeric_limits<std::uint32_t>::max(),
                               fmt::format("a number from {}, or any", first), {"any"});
}

void Parser::read_frequency(Fault& fault) const {
  if (find("occurrence") != nullptr)
    fault.occurrence = number<std::uint64_t>("occurrence", 1, std::numeric_limits<std::uint64_t>::max(),
                                             "a number from 1", {});
  if (find("probability") != nullptr)
    fault.probability = number<double>("probability", std::numeric_limits<double>::denorm_min(), 1,
                                       "a number above 0, of at most 1", {});
  if (find("seed") != nullptr)
    fault.seed = number<std::uint64_t>("seed", 0, std::numeric_limits<std::uint64_t>::max(),
                                       "a whole number of at least 0", {});
  if (fault.probability && find("seed") == nullptr)
    refuse("probability needs a seed: the draws depend on it");
  if (!fault.probability && find("seed") != nullptr)
    refuse("seed needs a probability: nothing else is drawn");
  if (fault.probability && find("occurrence") != nullptr)
    refuse("occurrence and probability exclude each other: it strikes by count or by chance");
}

void Parser::read_action(Fault& fault) const {
  const auto& value = required("fault");
  const auto colon = value.find(':');
  const bool has_argument = colon != std::string::npos;
  const auto argument = has_argument ? value.substr(colon + 1) : std::string();
  const auto refuse_action = [&] {
    Names names;
    for (const auto& [name, action] : actions()) names.push_back(name);
    refuse_value("fault", actions_in_words, names);
  };

  const auto found = actions().find(value.substr(0, colon));
  if (found == actions().end()) refuse_action();
  fault.action = found->second;
  if (fault.action == Action::exit) {
    const auto code = number_in<int>(argument, 0, 255);
    if (!code) refuse(fmt::format("fault is '{}'; CODE of exit:CODE must be a number from 0 to 255", value));
    fault.exit_code = *code;
  } else if (fault.action == Action::slow) {
    const auto delay = number_in<std::uint32_t>(argument, 1, longest_delay_ms);
    if (!delay)
      refuse(fmt::format("fault is '{}'; MILLISECONDS of slow:MILLISECONDS must be a number from 1 to {}",
                         value, longest_delay_ms));
    fault.delay = std::chrono::milliseconds(*delay);
  } else if (fault.action == Action::exception) {
    fault.message = has_argument ? argument : "injected fault";
  } else if (has_argument) {
    refuse_action();
  }
}

// Refuses faults that could never strike: a test with such a fault could not fail.
void Parser::check_phase(Fault& fault) const {
  if (fault.phase == base::FaultPhase::init && fault.step)
    refuse("phase init comes before every step; step must be any");
  if (fault.action != Action::nan) return;
  if (fault.phase && fault.phase != phase_of_nan)
    refuse(fmt::format("phase is '{}'; for fault=nan it must be {} or any", name_of(*fault.phase),
                       name_of(phase_of_nan)));
  fault.phase = phase_of_nan;
}

}  // namespace

Fault parse(const std::string& text) { return Parser(text).fault(); }

}  // namespace accelmgr::faults
