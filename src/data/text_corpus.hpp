// Text files as documents: which there are, and which of them are never trained on.
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

/// The regular files that `patterns` (paths, or globs of glob(3); relative to the working directory) name:
/// each real file once, however many links lead to it, sorted by path. Throws ConfigError (no patterns),
/// DataError (no match, no such file, dangling link, a directory, not a regular file).
std::vector<std::string> find_files(std::span<const std::string> patterns);

/// Reads them. Of files with the same content only the first is kept. Throws DataError (cannot be read, is
/// empty).
std::vector<Document> read_documents(std::span<const std::string> paths);

/// Puts whole documents aside until they hold about `share` (0 <= share < 1; 0: none) of all bytes.
///
/// The choice depends on nothing but the contents: documents come in the order of a hash of their text, each
/// is held out if it fits into what is still to be held out, and the smallest of those left over follows if
/// that brings the sum nearer to the goal. So the sum misses the goal by at most half of the smallest
/// document left over, and neither the seed nor the number of runners, nor where the files lie or what they
/// are called, moves a document to the other side. One document is left on either side even where that is
/// further from the goal: throws DataError when there are fewer than two.
TextCorpus hold_out(std::vector<Document> documents, double share);

/// All of the above. Throws as they do, and ConfigError when `share` is not in [0, 1).
TextCorpus read_corpus(std::span<const std::string> patterns, double share);

/// Bytes of all documents.
std::uint64_t total_bytes(std::span<const Document> documents);

}  // namespace accelmgr::data
