// A data source over rows in memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "accelmgr/batch_source.hpp"

namespace accelmgr::test {

/// A field and its rows, one after the other.
struct Column {
  FieldSpec field{};
  std::vector<std::byte> rows{};
};

/// An int64 column with 0, 1, ...
Column numbers(const std::string& name, std::size_t elements);

/// Element i is row i of each column. `epochs` 0 is endless. `seed` shuffles the rows; 0 leaves them in
/// order. The source has state().
std::unique_ptr<BatchSource> table_source(std::vector<Column> columns, int epochs, std::uint64_t seed);

}  // namespace accelmgr::test
