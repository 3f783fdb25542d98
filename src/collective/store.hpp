// Where ranks of several hosts find each other: a small map of keys and values that all can reach.
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.hpp"

namespace accelmgr::collective {

/// One thread at a time. All calls throw SessionError, which names the store's address, when it cannot be
/// reached.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// Waits until the key is there. Throws CollectiveError{timeout}, which names the key and the address.
  virtual std::string get(const std::string& key, base::Deadline deadline) = 0;
  virtual bool has(const std::string& key) = 0;
  /// Adds to a number, which is 0 before; returns the sum.
  virtual std::int64_t add(const std::string& key, std::int64_t amount) = 0;
};

}  // namespace accelmgr::collective
