// A store that several communicators share, each perhaps in its own thread. Thread-safe.
#pragma once

#include <mutex>
#include <string>

#include "launcher/collective/rendezvous/store.hpp"

namespace accelmgr::collective {

class SharedStore {
 public:
  explicit SharedStore(Store& store) : store_(store) {}

  void set(const std::string& key, const std::string& value) {
    const std::lock_guard lock(mutex_);
    store_.set(key, value);
  }
  bool has(const std::string& key) {
    const std::lock_guard lock(mutex_);
    return store_.has(key);
  }
  /// As Store::get(). Waits in short turns, between which other threads can use the store.
  std::string get(const std::string& key, base::Deadline deadline);

 private:
  std::mutex mutex_;
  Store& store_;
};

}  // namespace accelmgr::collective
