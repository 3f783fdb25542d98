// The backends that the contract is checked on. A new one is an entry in backends.cpp.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::collective::contract {

/// What a rank is: a thread of the test, a forked child of it, or this program executed again.
enum class Start { threads, forked, executed };
std::string name_of(Start start);

/// What the ranks of one world have in common before they join: made by the test, inherited by forked ranks,
/// handed to executed ones.
struct Prepared {
  std::vector<base::UniqueFd> fds;
  std::string text;            ///< Of any kind: a folder, an address.
  std::shared_ptr<void> kept;  ///< Lives in the test until all ranks have ended.
};

struct Backend {
  std::string name;        ///< Begins with what its communicators call themselves.
  std::vector<int> sizes;  ///< Numbers of ranks to run with.
  std::vector<Start> starts;
  /// Of a reduction of floating point numbers, relative; 0: exactly those of rank order.
  double tolerance = 0;
  /// The others are told of a death before that: 0.2 s, and what a busy machine takes to run them.
  double death_within_s = 3;
  std::function<std::string()> unavailable_because = [] { return std::string(); };  ///< Empty: it can be run.
  std::function<Prepared(int size)> prepare;
  /// Runs on the rank: `timeout_s` becomes the communicator's.
  std::function<std::shared_ptr<Communicator>(const Prepared&, int rank, int size, double timeout_s)> join;
};

const std::vector<Backend>& backends();
const Backend& find_backend(const std::string& name);

/// Built with sanitizers, everything takes ten times as long: fewer sizes will do.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

}  // namespace accelmgr::collective::contract
