// A store in one file that all ranks can open: file:///PATH.
//
//   offset 0  bytes committed (u64), counted from the first record on
//          8  records: key length (u32), value length (u32), key, value; the last one of a key counts
//
// Who writes appends a record and then commits it, so what a killed writer has left is written over. Byte 0
// of the file is locked, shared, by every process that has it open: who can lock it alone is the first, and
// empties what an earlier run has left, or the last, and removes the file. Byte 1 is locked by who writes.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "collective/store.hpp"

namespace accelmgr::distributed {

class FileStore : public collective::Store {
 public:
  /// Throws SessionError, which names the file, when it cannot be opened, or others have it locked until the
  /// deadline.
  FileStore(std::string path, base::Deadline deadline);
  ~FileStore() override;
  FileStore(const FileStore&) = delete;
  FileStore& operator=(const FileStore&) = delete;

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, base::Deadline deadline) override;
  bool has(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;

 private:
  class Writing;
  /// False when the file was removed meanwhile by the last of its earlier users.
  bool open_shared(base::Deadline deadline);
  void read_new();
  void append(const std::string& key, const std::string& value);

  std::string path_;
  base::UniqueFd fd_;
  std::uint64_t seen_ = 0;  ///< Bytes of records that `values_` knows.
  std::map<std::string, std::string> values_;
};

}  // namespace accelmgr::distributed
