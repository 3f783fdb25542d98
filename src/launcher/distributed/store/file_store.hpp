// A store in a file that all ranks can open: file:///PATH.
//
//   offset 0  bytes committed (u64), counted from the first record on
//          8  records: key length (u32), value length (u32), key, value; the last record of a key counts
//
// A writer appends a record and then commits it, so an incomplete record of a killed writer is overwritten.
// Two bytes of the file are locked (fcntl, open file description locks):
//   byte 0  Each store holds a shared lock while it has the file open. A store that gets it exclusively is
//           alone: when opening, it empties the file, which an earlier run left; when closing, it removes it.
//   byte 1  A writer holds an exclusive lock.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"
#include "base/unmovable.hpp"
#include "launcher/collective/rendezvous/store.hpp"

namespace accelmgr::distributed {

class FileStore : public collective::Store, private base::Unmovable {
 public:
  /// Throws SessionError, which names the file, if it cannot be opened or is locked until the deadline.
  FileStore(std::string path, base::Deadline deadline);
  ~FileStore() override;

  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, base::Deadline deadline) override;
  bool has(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t amount) override;

 private:
  class Writing;
  /// False if its last user removed the file in the meantime: then it must be opened again.
  bool open_shared(base::Deadline deadline);
  void read_new();
  void append(const std::string& key, const std::string& value);

  std::string path_;
  base::UniqueFd fd_;
  std::uint64_t seen_ = 0;  ///< Bytes of records that are in `values_`.
  std::map<std::string, std::string> values_;
};

}  // namespace accelmgr::distributed
