// The contract of Communicator as a list of promises. A promise is a function that every rank of a world
// runs. It is a test for each backend and each way to start ranks; the test runs it with each number of
// ranks.
//
//   CONTRACT(Barrier, ReturnsWhenAllHaveCalledIt, .fewest_ranks = 2) { self.world.barrier(); ... }
//
// The function cannot capture variables, because executed ranks find it by its name. It may use the
// assertions of GoogleTest, on its own thread.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "backends.hpp"
#include "meeting.hpp"

namespace accelmgr::collective::contract {

/// What a promise is run with.
struct Rank {
  Communicator& world;
  const Backend& backend;
  Start start;
  Meeting& meeting;
};

template <class Value>
bool contains(const std::vector<Value>& values, const Value& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

/// All ranks of a communicator, in order.
inline std::vector<int> all_of(const Communicator& communicator) {
  std::vector<int> ranks(static_cast<std::size_t>(communicator.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

using Body = void (*)(Rank&);

struct Needs {
  int fewest_ranks = 1;
  std::vector<int> sizes = {};     ///< Only these of the backend's; empty: all.
  std::vector<Start> starts = {};  ///< Likewise.
};

struct Promise {
  std::string suite;
  std::string name;
  Body body;
  Needs needs;
  const char* file;
  int line;
};

std::vector<Promise>& promises();
const Promise& find_promise(const std::string& full_name);  ///< "Barrier.ReturnsWhenAllHaveCalledIt"

/// Registers the tests, such as "Barrier/shm_forked.ReturnsWhenAllHaveCalledIt".
void register_tests();

struct Registered {
  explicit Registered(Promise promise) { promises().push_back(std::move(promise)); }
};

}  // namespace accelmgr::collective::contract

#define CONTRACT(suite, name, ...)                                                                     \
  static void suite##_##name(::accelmgr::collective::contract::Rank& self);                            \
  static const ::accelmgr::collective::contract::Registered suite##_##name##_registered(               \
      {#suite, #name, &suite##_##name, ::accelmgr::collective::contract::Needs{__VA_ARGS__}, __FILE__, \
       __LINE__});                                                                                     \
  static void suite##_##name([[maybe_unused]] ::accelmgr::collective::contract::Rank& self)
