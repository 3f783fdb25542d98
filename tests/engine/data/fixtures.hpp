// Shared by the tests of data sources: a reader of elements, and checks of states and of errors.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "message_of.hpp"
#include "refusal.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {

/// Reads a source as the loader does: into memory of its own, one row per field.
class Reader {
 public:
  explicit Reader(BatchSource& source) : source_(source) {
    for (const FieldSpec& field : source.fields()) rows_.emplace_back(field.bytes());
  }

  bool next() {
    ElementWriter writer(source_.fields(), {rows_.begin(), rows_.end()});
    return source_.next(writer);
  }

  template <typename T>
  std::vector<T> values(std::size_t field) const {
    std::vector<T> out(rows_.at(field).size() / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), rows_[field].data(), rows_[field].size());
    return out;
  }

  template <typename T>
  T value(std::size_t field) const {
    return values<T>(field).at(0);
  }

  /// Reads the next `count` elements, or all up to the end, and returns field 0 of each.
  template <typename T>
  std::vector<std::vector<T>> take(std::size_t count = 1'000'000) {
    std::vector<std::vector<T>> out;
    while (out.size() < count && next()) out.push_back(values<T>(0));
    return out;
  }

 private:
  BatchSource& source_;
  std::vector<std::vector<std::byte>> rows_;
};

/// Reads the next `count` elements, or all up to the end, and returns the bytes of all fields of each.
inline std::vector<std::string> element_bytes(BatchSource& source, std::size_t count = 1'000'000) {
  Reader reader(source);
  std::vector<std::string> out;
  while (out.size() < count && reader.next()) {
    std::string& element = out.emplace_back();
    for (std::size_t field = 0; field < source.fields().size(); ++field)
      for (const char byte : reader.values<char>(field)) element += byte;
  }
  return out;
}

/// Checks after each number of elements: a new source that is restored from the state of the first gives the
/// same elements from there on, and reports the same state. `make` makes a source; at most `count` of its
/// elements are checked.
template <typename Make>
void expect_states_restore(Make&& make, std::size_t count) {
  const auto whole = make();
  const auto all = element_bytes(*whole, count);
  const auto first = make();
  for (std::size_t given = 0; given <= all.size(); ++given) {
    SCOPED_TRACE(testing::Message() << "after " << given << " elements");
    const auto state = first->state();
    ASSERT_TRUE(state.has_value());
    EXPECT_LE(state->size(), BatchSource::max_state_bytes);
    const auto second = make();
    second->restore(*state);
    EXPECT_EQ(second->state(), state);
    const std::vector<std::string> rest(all.begin() + static_cast<std::ptrdiff_t>(given), all.end());
    EXPECT_EQ(element_bytes(*second, rest.size()), rest);
    element_bytes(*first, 1);
  }
}

/// The message with which `source` refuses a state.
inline std::string refusal(BatchSource& source, const std::string& state) {
  return message_of<DataError>([&] { source.restore(state); });
}

}  // namespace accelmgr::test
