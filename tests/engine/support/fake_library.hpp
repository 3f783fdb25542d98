// What the fakes of libraries have in common: they count their calls, and fail on demand.
#pragma once

#include <map>
#include <mutex>
#include <string>

namespace accelmgr::test {

/// `Code`: what a call returns, 0 if it succeeds.
template <class Code>
class FakeLibrary {
 protected:
  // With the mutex.
  template <class Work>
  auto locked(Work work) {
    const std::lock_guard lock(mutex_);
    return work();
  }
  template <class T>
  T read(const T& field) {
    return locked([&] { return field; });
  }
  template <class T>
  void write(T& field, T value) {
    locked([&] { field = value; });
  }

 public:
  /// Call `nth` (from 1) of the function from now on fails.
  void fail(const std::string& function, int nth, Code code) {
    const std::lock_guard lock(mutex_);
    faults_[function] = {nth, code};
  }
  /// How often the function was called.
  int calls(const std::string& function) {
    return locked([&] { return calls_[function]; });
  }

 protected:
  /// Counts a call, for one who has the mutex. Returns the error that it is to report.
  Code count(const std::string& function) {
    ++calls_[function];
    const auto fault = faults_.find(function);
    return fault == faults_.end() || --fault->second.nth != 0 ? Code{} : fault->second.code;
  }

  std::mutex mutex_;

 private:
  struct Fault {
    int nth;
    Code code;
  };
  std::map<std::string, Fault> faults_;
  std::map<std::string, int> calls_;
};

}  // namespace accelmgr::test
