// A store over a folder: for ranks that share files, whatever else they do not share.
#pragma once

#include <filesystem>
#include <memory>

#include "collective/store.hpp"

namespace accelmgr::collective::contract {

/// A folder of its own, which goes with all that is in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

/// One file a key. Any number of processes and threads, each with a FileStore of its own.
class FileStore final : public Store {
 public:
  explicit FileStore(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, base::Deadline deadline) override;
  bool has(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;

 private:
  std::filesystem::path path_of(const std::string& key) const;

  std::filesystem::path folder_;
};

}  // namespace accelmgr::collective::contract
