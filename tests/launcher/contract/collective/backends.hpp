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

/// What the ranks of a world share before they join. The test makes it. Forked ranks inherit it, executed
/// ranks get it from the test.
struct Prepared {
  std::vector<base::UniqueFd> fds;
  std::string text;            ///< Of any meaning, such as a folder or an address.
  std::shared_ptr<void> kept;  ///< Lives in the test until all ranks have ended.
};

struct Backend {
  std::string name;        ///< Begins with the backend() of its communicators.
  std::vector<int> sizes;  ///< Numbers of ranks to run with.
  std::vector<Start> starts;
  /// Floating point reductions have the bits of a reduction in rank order. If false, they are near it.
  bool in_rank_order = true;
  std::vector<std::string> exceptions = {};  ///< Promises that it does not keep: "Suite.Name".
  /// The other ranks are told of a death within this time: 0.2 s, and what a busy machine takes to run them.
  double death_within_s = 15;
  std::function<Prepared(int size)> prepare;
  /// Joins the world as `rank`; runs on that rank. `timeout_s` becomes the communicator's timeout.
  std::function<std::shared_ptr<Communicator>(const Prepared&, int rank, int size, double timeout_s)> join;
};

const std::vector<Backend>& backends();
const Backend& find_backend(const std::string& name);

/// With sanitizers everything takes ten times as long, so tests use fewer sizes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

}  // namespace accelmgr::collective::contract
