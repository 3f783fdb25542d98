#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <limits>
#include <map>
#include <sstream>

#include "accelmgr/errors.hpp"
#include "engine/faults/plan.hpp"

namespace accelmgr::faults {
namespace {

constexpr int last_rank = 23;                             // The highest rank that Config::nprocs allows.
constexpr auto phase_of_nan = base::FaultPhase::forward;  // Only this phase looks at FaultEffect::nan.
constexpr std::uint32_t longest_delay_ms = 3'600'000;
constexpr std::string_view keys[] = {"rank",       "step",        "phase", "occurrence",
                                     "generation", "probability", "seed",  "fault"};

/// In the order of Action.
constexpr std::string_view actions[] = {"kill", "stop", "exit", "exception", "hang", "nan", "slow"};

/// Reads one fault. It refuses those that could never strike: a test with such a fault could not fail.
class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {
    std::istringstream words(text);
    for (std::string word; words >> word;) {
      const auto sign = word.find('=');
      const auto key = word.substr(0, sign);
      if (sign == std::string::npos || std::ranges::find(keys, key) == std::end(keys)) refuse(word);
      if (!values_.emplace(key, word.substr(sign + 1)).second) refuse(key);
    }
  }

  Fault fault() const {
    Fault fault;
    fault.text = text_;
    if (at("rank") == "manager")
      fault.rank = manager_rank;
    else if (at("rank") != "any")
      fault.rank = number<int>("rank", 0, last_rank);
    if (at("phase") != "any") fault.phase = phase();
    if (has("step") && at("step") != "any") fault.step = number<std::uint64_t>("step", 1);
    const std::uint32_t first = fault.rank == manager_rank ? 0 : 1;
    if (!has("generation"))
      fault.generation = first;
    else if (at("generation") != "any")
      fault.generation = number<std::uint32_t>("generation", first);
    if (has("occurrence")) fault.occurrence = number<std::uint64_t>("occurrence", 1);
    if (has("probability"))
      fault.probability = number<double>("probability", std::numeric_limits<double>::denorm_min(), 1);
    if (has("seed")) fault.seed = number<std::uint64_t>("seed", 0);
    // Draws depend on the seed, and nothing else does.
    if (has("probability") != has("seed")) refuse("seed");
    if (has("probability") && has("occurrence")) refuse("occurrence");
    read_action(fault);
    if (fault.phase == base::FaultPhase::init && fault.step) refuse("step");  // It comes before every step.
    if (fault.action != Action::nan) return fault;
    if (fault.phase && fault.phase != phase_of_nan) refuse("phase");
    fault.phase = phase_of_nan;
    return fault;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw ConfigError(
        fmt::format("faults: '{}': {} is wrong; tests/engine/faults/plan.hpp says what is right", text_,
                    what),
        "faults");
  }

  bool has(const std::string& key) const { return values_.contains(key); }
  const std::string& at(const std::string& key) const {
    if (!has(key)) refuse(key);
    return values_.at(key);
  }

  template <class T>
  T number(const std::string& key, T min, T max = std::numeric_limits<T>::max()) const {
    return number_in(key, at(key), min, max);
  }
  template <class T>
  T number_in(const std::string& key, std::string_view text, T min, T max) const {
    T value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    // The comparison is negated so that it rejects NaN too.
    if (error != std::errc{} || end != text.data() + text.size() || !(value >= min && value <= max))
      refuse(key);
    return value;
  }

  base::FaultPhase phase() const {
    const auto found = std::ranges::find(phases, at("phase"), name_of);
    if (found == phases.end()) refuse("phase");
    return *found;
  }

  void read_action(Fault& fault) const {
    const auto& value = at("fault");
    const auto colon = value.find(':');
    const auto argument = colon == std::string::npos ? "" : value.substr(colon + 1);
    const auto found = std::ranges::find(actions, value.substr(0, colon));
    if (found == std::end(actions)) refuse("fault");
    fault.action = static_cast<Action>(found - actions);
    if (fault.action == Action::exit)
      fault.exit_code = number_in<int>("fault", argument, 0, 255);
    else if (fault.action == Action::slow)
      fault.delay =
          std::chrono::milliseconds(number_in<std::uint32_t>("fault", argument, 1, longest_delay_ms));
    else if (fault.action == Action::exception)
      fault.message = colon == std::string::npos ? "injected fault" : argument;
    else if (colon != std::string::npos)
      refuse("fault");
  }

  std::string text_;
  std::map<std::string, std::string> values_;
};

}  // namespace

Fault parse(const std::string& text) { return Parser(text).fault(); }

}  // namespace accelmgr::faults
