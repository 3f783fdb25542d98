// What a data source is doing, for processes that wait for it.
#pragma once

#include <cstdint>
#include <string>

namespace accelmgr::data {

/// A read under way.
struct Reading {
  std::string what;  ///< BatchSource::reading(): "next()"
  std::uint64_t element = 0;
  std::int64_t since_ns = 0;
};

}  // namespace accelmgr::data
