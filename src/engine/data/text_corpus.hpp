// Text files as documents, and the choice of those that are held out from training.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace accelmgr::data {

/// The bytes of one file, in memory.
struct Document {
  std::string path;  ///< Without symbolic links.
  std::string text;  ///< Never empty.
};

struct TextCorpus {
  std::vector<Document> training;
  std::vector<Document> held_out;  ///< Empty if nothing was to be held out.
};

/// Returns the regular files that `patterns` name, sorted by path. Patterns are paths or globs of glob(3),
/// relative to the working directory. Each real file comes once, however many links lead to it. Throws
/// ConfigError when there are no patterns; DataError when a pattern has no match, or a path is a dangling
/// link, a directory, or otherwise not a regular file.
std::vector<std::string> find_files(std::span<const std::string> patterns);

/// Reads the files. Of files with the same content only the first is kept. Throws DataError when a file
/// cannot be read or is empty, and SystemError when memory or descriptors are exhausted.
std::vector<Document> read_documents(std::span<const std::string> paths);

/// Holds out whole documents that have together about `share` (0 <= share < 1; 0: none) of all bytes.
///
/// The choice depends on the contents alone. The documents are taken in the order of a hash of their text.
/// Each is held out if it fits into what is still missing. At the end the smallest remaining document is
/// added if that brings the sum nearer to the goal. So the sum misses the goal by at most half of the
/// smallest remaining document. Neither the seed, the number of runners, nor the paths of the files move a
/// document to the other side. At least one document is left on either side, even if that is further from the
/// goal. Throws DataError when there are fewer than two.
TextCorpus hold_out(std::vector<Document> documents, double share);

/// Finds, reads and splits the files. Throws as those functions do, and ConfigError when `share` is not in
/// [0, 1).
TextCorpus read_corpus(std::span<const std::string> patterns, double share);

/// Bytes of all documents.
std::uint64_t total_bytes(std::span<const Document> documents);

}  // namespace accelmgr::data
