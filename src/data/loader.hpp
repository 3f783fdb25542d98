// The data manager: reads a source and deals its elements, one after the other, into the devices' queues.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "accelmgr/batch_source.hpp"
#include "session/batch_queue.hpp"
#include "session/manifest.hpp"
#include "session/session.hpp"

namespace accelmgr::data {

/// An agent: do_work() makes progress and never waits for a queue; production gives it a thread (run()),
/// tests step it.
class Loader {
 public:
  Loader(std::unique_ptr<BatchSource> source, const session::Session& session,
         const session::Manifest& manifest, int batch_size, bool drop_last);

  /// Writes one element into its device's slot. Returns false when it cannot: that device's queue is full, or
  /// the data has ended.
  bool do_work();
  /// The source has ended or failed, and every queue says so.
  bool finished() const noexcept { return finished_; }
  /// Works until finished() or the session stops. Sleeps while a queue is full.
  void run();

  /// Elements dealt, and elements that made no full batch and were left out (`drop_last`).
  std::uint64_t dealt() const noexcept { return dealt_; }
  std::uint64_t dropped() const noexcept { return dropped_; }

 private:
  /// A batch under way in a device's slot.
  struct Open {
    std::byte* slot = nullptr;
    std::uint64_t elements = 0;
  };
  bool write_element(Open& open);
  void finish(const std::string& error);

  std::unique_ptr<BatchSource> source_;
  const session::Session* session_;
  std::vector<session::FieldEntry> fields_;
  std::vector<session::BatchQueue> queues_;
  std::vector<Open> open_;
  std::uint64_t batch_size_;
  bool drop_last_;
  bool finished_ = false;
  std::uint64_t dealt_ = 0;
  std::uint64_t dropped_ = 0;
};

/// The fields of a batch as the manifest lists them; not yet placed.
std::vector<session::FieldEntry> field_entries(std::span<const FieldSpec> fields);

}  // namespace accelmgr::data
