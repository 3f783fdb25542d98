// An explicit-state explorer. It visits every state that a model can reach, breadth first, so the trace to a
// state that breaks a promise is a shortest one.
//
// A Model has
//   State                             plain data of 32-bit words, equal when its bytes are equal
//   initial()                         the first state
//   steps(state, Steps<State>&)       all steps that are possible next; faults are marked
//   wrong(state)                      the promise that this state breaks, or null
//   may_rest(state)                   true if a state may be left by faults only, or not at all
//   text(state)                       the state as a text for the trace
// Beside the states that wrong() names, the explorer finds two defects: a state that only a fault can leave
// although it may not rest, and a circle of steps, in which a system could go round for ever.
#pragma once

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace accelmgr::session {

/// The steps that are possible in a state.
template <class State>
class Steps {
 public:
  struct Step {
    State to;
    const char* who;
    const char* what;
    bool fault;
  };

  /// Adds a step. Returns its state, which begins as a copy of `from`; the caller changes it.
  State& add(const State& from, const char* who, const char* what, bool fault = false) {
    auto& step = steps_.at(count_++);
    step = {from, who, what, fault};
    return step.to;
  }
  void clear() noexcept { count_ = 0; }
  std::span<const Step> all() const noexcept { return {steps_.data(), count_}; }
  std::span<Step> all() noexcept { return {steps_.data(), count_}; }

 private:
  std::array<Step, 48> steps_;
  std::size_t count_ = 0;
};

/// Adds the steps of one process, which `process_in(state)` returns. With a second argument the process
/// stands there afterwards.
template <class State, class ProcessIn>
struct StepsOfProcess {
  const State& from;
  Steps<State>& out;
  const char* who;
  ProcessIn process_in;

  State& operator()(const char* what) const { return out.add(from, who, what); }
  template <class Pc>
  State& operator()(const char* what, Pc to) const {
    auto& state = out.add(from, who, what);
    process_in(state).pc = to;
    return state;
  }
};

template <class State, class ProcessIn>
StepsOfProcess<State, ProcessIn> steps_of_process(const State& from, Steps<State>& out, const char* who,
                                                  ProcessIn process_in) {
  return {from, out, who, process_in};
}

/// Sends a process to its next step. Returns what it has done.
template <class Process, class Pc>
const char* go_on(Process& process, Pc to, const char* what) {
  process.pc = to;
  return what;
}

/// The result of an exploration.
struct Exploration {
  std::size_t states = 0;
  std::size_t steps = 0;
  std::string broken;  ///< The promise that a state breaks; empty if no state breaks one.
  std::string trace;   ///< The steps that lead to that state.
};

template <class Model>
class Explorer {
 public:
  using State = typename Model::State;

  explicit Explorer(const Model& model) : model_(model) {}

  /// Throws std::length_error if the model has more than `limit` states.
  Exploration explore(std::size_t limit) {
    insert(model_.initial(), 0);
    Steps<State> next;
    for (std::uint32_t at = 0; at < states_.size(); ++at) {
      if (const char* promise = model_.wrong(states_[at])) return broken(promise, at);
      next.clear();
      model_.steps(states_[at], next);
      bool goes_on = model_.may_rest(states_[at]);
      for (const auto& step : next.all()) {
        goes_on = goes_on || !step.fault;
        ++entries_[insert(step.to, at)];
        ++steps_;
      }
      if (!goes_on) return broken("never stuck: nothing can happen any more", at);
      if (states_.size() > limit)
        throw std::length_error(fmt::format("more than {} states can be reached", limit));
    }
    if (const auto at = on_a_circle(); at < states_.size())
      return broken("never stuck: the steps go round in a circle", at);
    return {states_.size(), steps_, {}, {}};
  }

 private:
  static constexpr std::uint32_t none = ~std::uint32_t{0};
  using Words = std::array<std::uint32_t, sizeof(State) / 4>;
  static_assert(sizeof(State) % 4 == 0);

  static std::size_t hash(const State& state) noexcept {
    std::uint64_t h = 0;
    for (const auto word : std::bit_cast<Words>(state)) {
      h = (h ^ word) * 0x9e3779b97f4a7c15ull;
      h ^= h >> 29;
    }
    return h;
  }
  static bool same(const State& a, const State& b) noexcept {
    return std::bit_cast<Words>(a) == std::bit_cast<Words>(b);
  }

  std::size_t place_of(const State& state) const noexcept {
    auto place = hash(state) & (places_.size() - 1);
    while (places_[place] != none && !same(states_[places_[place]], state))
      place = (place + 1) & (places_.size() - 1);
    return place;
  }

  std::uint32_t insert(const State& state, std::uint32_t from) {
    if (states_.size() * 2 >= places_.size()) {
      places_.assign(places_.size() * 2, none);
      for (std::uint32_t i = 0; i < states_.size(); ++i) places_[place_of(states_[i])] = i;
    }
    auto& place = places_[place_of(state)];
    if (place == none) {
      place = static_cast<std::uint32_t>(states_.size());
      states_.push_back(state);
      parents_.push_back(from);
      entries_.push_back(0);
    }
    return place;
  }

  /// Takes states away in topological order. Returns a state that remains, which is on a circle or reached
  /// from one, or the number of states if none remains.
  std::uint32_t on_a_circle() {
    std::vector<std::uint32_t> free;
    if (entries_[0] == 0) free.push_back(0);
    Steps<State> next;
    while (!free.empty()) {
      const auto at = free.back();
      free.pop_back();
      next.clear();
      model_.steps(states_[at], next);
      for (const auto& step : next.all()) {
        const auto to = places_[place_of(step.to)];
        if (--entries_[to] == 0) free.push_back(to);
      }
    }
    std::uint32_t at = 0;
    while (at < states_.size() && entries_[at] == 0) ++at;
    return at;
  }

  Exploration broken(const char* promise, std::uint32_t at) const {
    std::vector<std::uint32_t> path{at};
    while (path.back() != 0) path.push_back(parents_[path.back()]);
    std::string trace = fmt::format("{:66}{}\n", "", model_.text(states_[0]));
    Steps<State> next;
    for (auto i = path.size() - 1; i-- > 0;) {
      next.clear();
      model_.steps(states_[path[i + 1]], next);
      for (const auto& step : next.all()) {
        if (!same(step.to, states_[path[i]])) continue;
        trace += fmt::format("{:10} {:54} {}\n", step.who, step.what, model_.text(step.to));
        break;
      }
    }
    return {states_.size(), steps_, promise, trace};
  }

  const Model& model_;
  std::vector<State> states_;
  std::vector<std::uint32_t> parents_;
  std::vector<std::uint32_t> entries_;  ///< The number of steps that lead to each state.
  std::vector<std::uint32_t> places_ = std::vector<std::uint32_t>(1 << 16, none);
  std::size_t steps_ = 0;
};

}  // namespace accelmgr::session
