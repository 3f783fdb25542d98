#include "engine/data/text_corpus.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <set>
#include <unordered_set>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/errno_text.hpp"
#include "base/fnv1a.hpp"
#include "base/log.hpp"
#include "base/split_mix.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::data {
namespace {

constexpr const char* what_to_name = "name files, or match them with a glob such as 'texts/*.txt'";

std::string working_directory() {
  std::error_code ignored;
  return std::filesystem::current_path(ignored).string();
}

[[noreturn]] void throw_no_match(const std::string& pattern) {
  if (pattern.find_first_of("*?[") != std::string::npos) {
    throw DataError(fmt::format("data.files: no file matches '{}' in '{}'", pattern, working_directory()));
  }
  throw DataError(fmt::format("data.files: no such file: '{}' in '{}'", pattern, working_directory()));
}

// The paths that a pattern matches, sorted. A path that exists stands for itself, whatever characters it has.
std::vector<std::string> expand(const std::string& pattern) {
  struct stat status;
  if (::lstat(pattern.c_str(), &status) == 0) return {pattern};

  glob_t matches = {};
  const int error = ::glob(pattern.c_str(), GLOB_ERR, nullptr, &matches);
  const int code = errno;
  const std::unique_ptr<glob_t, decltype(&::globfree)> owner(&matches, &::globfree);
  if (error == GLOB_NOMATCH) throw_no_match(pattern);
  if (error != 0) {
    throw DataError(fmt::format("data.files: '{}' cannot be matched: {}", pattern,
                                error == GLOB_NOSPACE ? "out of memory" : std::strerror(code)));
  }
  return {matches.gl_pathv, matches.gl_pathv + matches.gl_pathc};
}

// The status of the file at `path`, following links. Throws for anything but a regular file. Call it before
// opening: opening a FIFO blocks until it has a writer.
struct stat regular_file(const std::string& path) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0) {
    const int code = errno;
    const bool dangling = code == ENOENT && ::lstat(path.c_str(), &status) == 0;
    throw DataError(
        fmt::format("data.files: '{}': {}", path,
                    dangling ? "a symbolic link to a file that does not exist" : std::strerror(code)));
  }
  if (S_ISDIR(status.st_mode)) {
    throw DataError(fmt::format("data.files: '{}' is a directory, not a file: {}", path, what_to_name));
  }
  if (!S_ISREG(status.st_mode)) {
    throw DataError(fmt::format("data.files: '{}' is neither a regular file nor a link to one", path));
  }
  return status;
}

std::string real_path(const std::string& path) {
  const std::unique_ptr<char, decltype(&::free)> resolved(::realpath(path.c_str(), nullptr), &::free);
  if (!resolved) throw DataError(fmt::format("data.files: '{}': {}", path, std::strerror(errno)));
  return resolved.get();
}

std::string read_file(const std::string& path) {
  const auto fail = [&](const char* what) {
    const int code = errno;
    if (base::is_shortage(code))
      throw SystemError(fmt::format("data.files: '{}' cannot be {}", path, what), code);
    throw DataError(fmt::format("data.files: '{}' cannot be {}: {}", path, what, std::strerror(code)));
  };
  const base::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) fail("opened");
  struct stat status;
  if (::fstat(fd.get(), &status) != 0) fail("read");

  // The size is a hint; read() says where the file ends. With one more byte the buffer need not grow to learn
  // that.
  std::string text(static_cast<std::size_t>(status.st_size) + 1, '\0');
  std::size_t filled = 0;
  for (;;) {
    if (filled == text.size()) text.resize(2 * text.size());
    const ssize_t count = ::read(fd.get(), text.data() + filled, text.size() - filled);
    if (count == 0) break;
    if (count > 0) filled += static_cast<std::size_t>(count);
    if (count < 0 && errno != EINTR) fail("read");
  }
  text.resize(filled);
  return text;
}

void sort_by_hash(std::vector<Document>& documents) {
  std::vector<std::pair<std::uint64_t, Document>> hashed;
  for (Document& document : documents) {
    // mix() makes up for weak high bits.
    const std::uint64_t hash = base::mix(base::fnv1a(document.text));
    hashed.emplace_back(hash, std::move(document));
  }
  std::stable_sort(hashed.begin(), hashed.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  documents.clear();
  for (auto& [hash, document] : hashed) documents.push_back(std::move(document));
}

void sort_by_path(std::vector<Document>& documents) {
  std::sort(documents.begin(), documents.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
}

void log_corpus(const TextCorpus& corpus) {
  base::log().info("text: {} documents of {} bytes to train on, {} of {} bytes held out",
                   corpus.training.size(), total_bytes(corpus.training), corpus.held_out.size(),
                   total_bytes(corpus.held_out));
  for (const Document& document : corpus.held_out) {
    base::log().info("text: '{}' is held out ({} bytes)", document.path, document.text.size());
  }
}

}  // namespace

std::vector<std::string> find_files(std::span<const std::string> patterns) {
  if (patterns.empty()) {
    throw ConfigError(fmt::format("data.files is empty, but data.kind text reads files: {}", what_to_name),
                      "data.files");
  }
  std::vector<std::string> files;
  std::set<std::pair<dev_t, ino_t>> seen;
  for (const std::string& pattern : patterns) {
    for (const std::string& match : expand(pattern)) {
      const struct stat status = regular_file(match);
      if (seen.emplace(status.st_dev, status.st_ino).second) files.push_back(real_path(match));
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<Document> read_documents(std::span<const std::string> paths) {
  std::vector<Document> documents;
  documents.reserve(paths.size());  // `seen` points into the documents, so they must not move.
  std::unordered_set<std::string_view> seen;
  for (const std::string& path : paths) {
    std::string text = read_file(path);
    if (text.empty()) throw DataError(fmt::format("data.files: '{}' is empty", path));
    if (seen.contains(text)) {
      base::log().info("text: '{}' has the content of another file and is left out", path);
      continue;
    }
    documents.push_back({path, std::move(text)});
    seen.insert(documents.back().text);
  }
  return documents;
}

TextCorpus hold_out(std::vector<Document> documents, double share) {
  if (share == 0) return {.training = std::move(documents), .held_out = {}};
  if (documents.size() < 2) {
    throw DataError(fmt::format(
        "data.held_out is {}, but there is only one document ('{}'), and whole documents are held out: "
        "add files of other content, or set data.held_out to 0",
        share, documents.empty() ? "" : documents.front().path));
  }
  const auto goal = static_cast<std::uint64_t>(share * static_cast<double>(total_bytes(documents)));
  sort_by_hash(documents);

  TextCorpus corpus;
  std::uint64_t missing = goal;
  for (Document& document : documents) {
    const bool fits = document.text.size() <= missing;
    if (fits) missing -= document.text.size();
    (fits ? corpus.held_out : corpus.training).push_back(std::move(document));
  }
  const auto smallest =
      std::min_element(corpus.training.begin(), corpus.training.end(),
                       [](const auto& a, const auto& b) { return a.text.size() < b.text.size(); });
  // It did not fit, so it is larger than what is missing.
  const bool nearer = smallest->text.size() - missing < missing;
  if (corpus.held_out.empty() || (nearer && corpus.training.size() > 1)) {
    corpus.held_out.push_back(std::move(*smallest));
    corpus.training.erase(smallest);
  }
  sort_by_path(corpus.training);
  sort_by_path(corpus.held_out);
  return corpus;
}

TextCorpus read_corpus(std::span<const std::string> patterns, double share) {
  if (!(share >= 0 && share < 1)) {
    throw ConfigError(fmt::format("data.held_out is {}; it must be a share, from 0 to less than 1", share),
                      "data.held_out");
  }
  TextCorpus corpus = hold_out(read_documents(find_files(patterns)), share);
  log_corpus(corpus);
  return corpus;
}

std::uint64_t total_bytes(std::span<const Document> documents) {
  std::uint64_t bytes = 0;
  for (const Document& document : documents) bytes += document.text.size();
  return bytes;
}

}  // namespace accelmgr::data
