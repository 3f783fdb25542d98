// Where ranks of several nodes find each other: a small map of keys and values that all of them can reach.
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.hpp"

namespace accelmgr::collective {

/// Not thread-safe. Every call throws SessionError, which names the store's address, when the store cannot be
/// reached.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Blocks until the key exists. Throws CollectiveError{timeout}, which names the key and the address.
  virtual std::string get(const std::string& key, base::Deadline deadline) = 0;
  virtual bool has(const std::string& key) = 0;
  /// Adds `amount` to the number under `key`, which starts at 0. Returns the sum.
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;
};

}  // namespace accelmgr::collective
