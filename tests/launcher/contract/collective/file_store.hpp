// A store in a folder, for ranks that share files and perhaps nothing else.
#pragma once

#include <filesystem>
#include <memory>

#include "launcher/collective/hosts/store.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::collective::contract {

using test::TemporaryFolder;

/// Keeps each key in a file. Any number of processes and threads may use the folder, each with a FileStore of
/// its own.
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
