// What a service tells of its spans, as a file for Perfetto (https://ui.perfetto.dev) and chrome://tracing:
// the JSON of https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event
// Format), with one process for each pid, complete events ("X") and names ("M").
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <ostream>
#include <string>
#include <vector>

namespace accelmgr::program {

class TraceFile {
 public:
  /// Takes the answer to a GET /v1/trace. Throws SessionError if it is none.
  void add(const nlohmann::json& answer);
  /// Times in the file are microseconds, down to an eighth. An eighth has no rounding error in a double: so
  /// spans that touch or nest still do for each reader.
  void write(std::ostream& file) const;

  std::size_t spans() const noexcept { return spans_.size(); }
  std::size_t processes() const;
  /// Spans that were written over before they were read.
  std::uint64_t overwritten() const noexcept { return overwritten_; }

 private:
  enum class Thread { host, supervisor, loader, checkpoint_writer, runner };
  struct Span {
    std::int64_t begin_ns, end_ns;
    std::uint64_t step, attempt;
    std::int32_t pid;
    Thread thread;
    int rank;  ///< -1: none.
    std::string activity;
  };
  struct Track {
    std::int32_t pid;
    int tid;
    auto operator<=>(const Track&) const = default;
  };
  static Track track_of(const Span& span);
  static std::string name_of(const Span& span);
  void write_names(std::ostream& file) const;

  std::vector<Span> spans_;
  std::uint64_t overwritten_ = 0;
};

}  // namespace accelmgr::program
