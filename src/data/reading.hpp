// What a data source is doing, for those who wait for it.
#pragma once

#include <cstdint>
#include <string>

namespace accelmgr::data {

/// A read under way.
struct Reading {
  std::string what;  ///< "next()"
  std::uint64_t element = 0;
  std::int64_t since_ns = 0;
};

/// A source that says in its own words what it does to read an element; of others it is next().
class ReadsAs {
 public:
  virtual ~ReadsAs() = default;
  /// Any thread, also while it reads. "dataset[7]".
  virtual std::string reading(std::uint64_t element) const = 0;
};

}  // namespace accelmgr::data
