#include "contract.hpp"

#include <algorithm>
#include <stdexcept>

#include "world.hpp"

namespace accelmgr::collective::contract {
namespace {

template <class Value>
bool is_wanted(const std::vector<Value>& wanted, const Value& value) {
  return wanted.empty() || contains(wanted, value);
}

/// With sanitizers, worlds of processes are worth it only with 2 and with 4 ranks: processes run the same
/// code as threads and take longer to start.
bool is_worth_it(Start start, int size) {
  return !sanitized || start == Start::threads || size == 2 || size == 4;
}

std::vector<int> sizes_of(const Promise& promise, const Backend& backend, Start start) {
  std::vector<int> possible, worth_it;
  for (const int size : backend.sizes) {
    if (size < promise.needs.fewest_ranks || !is_wanted(promise.needs.sizes, size)) continue;
    possible.push_back(size);
    if (is_worth_it(start, size)) worth_it.push_back(size);
  }
  return worth_it.empty() ? possible : worth_it;
}

class ContractTest : public testing::Test {
 public:
  ContractTest(const Promise& promise, const Backend& backend, Start start)
      : promise_(promise), backend_(backend), start_(start) {}

  void TestBody() override {
    for (const int size : sizes_of(promise_, backend_, start_))
      for (const auto& failure : run_world(backend_, start_, size, promise_))
        ADD_FAILURE() << size << " ranks, " << failure;
  }

 private:
  const Promise& promise_;
  const Backend& backend_;
  Start start_;
};

}  // namespace

std::vector<Promise>& promises() {
  static std::vector<Promise> all;
  return all;
}

const Promise& find_promise(const std::string& full_name) {
  for (const auto& promise : promises())
    if (promise.suite + "." + promise.name == full_name) return promise;
  throw std::invalid_argument("no promise " + full_name);
}

void register_tests() {
  for (const auto& backend : backends())
    for (const auto start : backend.starts)
      for (const auto& promise : promises()) {
        if (contains(backend.exceptions, promise.suite + "." + promise.name)) continue;
        if (!is_wanted(promise.needs.starts, start) || sizes_of(promise, backend, start).empty()) continue;
        const auto suite = promise.suite + "/" + backend.name + "_" + name_of(start);
        testing::RegisterTest(suite.c_str(), promise.name.c_str(), nullptr, nullptr, promise.file,
                              promise.line, [&promise, &backend, start]() -> testing::Test* {
                                return new ContractTest(promise, backend, start);
                              });
      }
}

}  // namespace accelmgr::collective::contract
