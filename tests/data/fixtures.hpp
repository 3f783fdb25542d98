// What the tests of data sources share.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "message_of.hpp"

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

  /// Field 0 of the next `count` elements, or of all up to the end.
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

/// All fields of the next `count` elements, or of all up to the end, as bytes.
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

/// After any number of elements, a new source restored from the state of the first gives what the first gives
/// after it, and says that it stands there. `make` makes a source; of an endless one, `count` are looked at.
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

/// A folder that goes with the test.
class Folder {
 public:
  Folder() {
    std::string name = std::filesystem::temp_directory_path() / "accelmgr-data-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp " + name);
    path_ = std::filesystem::canonical(name);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return path_ / name; }

  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

/// The key of the ConfigError that `call` throws.
template <typename Call>
std::string config_key_of(Call&& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.key();
  }
  ADD_FAILURE() << "no ConfigError";
  return {};
}

inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
}

}  // namespace accelmgr::test
