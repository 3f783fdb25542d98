// One attempt of a small session, up to the section in which one of its ranks is to die: what stands in the
// shared memory then, how the others recover, and whether the step has counted in full or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "session/reduction.hpp"
#include "session_support.hpp"

namespace accelmgr::session {

/// What the dying rank is doing.
enum class Section {
  last_vote,   ///< All others have voted; none has reduced its slice.
  last_slice,  ///< The attempt is committed, all other slices are finished.
};

struct Death {
  int ranks;
  int rank;  ///< That dies.
  bool accumulate;
  Section section;
};

class SmallStep {
 public:
  /// Stands before the section. Two views of the same session, as two processes have.
  explicit SmallStep(const Death& death);

  /// What the rank does in the section, from where it stands to its end.
  void run_section() const;
  /// What the others do once it is dead, in the supervisor's order; each slice from where its cursor stands.
  void recover() const;
  /// The same, but an image in flight is not put back.
  void recover_without_undo() const;

  /// All of the session that the section or a recovery changes.
  struct Image {
    std::vector<std::byte> head;  ///< Control, records, copies, undo images.
    std::vector<std::byte> gradients;
    bool operator==(const Image&) const = default;
  };
  void take(Image& image) const;
  void put_back(const Image& image) const;

  /// Whether the last vote is cast.
  bool committed() const;
  /// After a recovery: what is wrong, given whether the attempt was committed when the rank died; empty:
  /// nothing. An attempt that did not count is made again, by all, and has to count then.
  std::string wrong(bool was_committed) const;
  /// The same of the undisturbed run, against plain arithmetic.
  std::string undisturbed_wrong() const;

 private:
  RankMask participants() const noexcept { return all_ranks(death_.ranks); }
  void fill();
  std::uint64_t open() const;
  void vote(const Session& session, const Reduction& reduction, int rank, std::uint64_t attempt) const;
  void finish(std::uint64_t attempt) const;
  std::string differs(const Image& expected, std::uint32_t index) const;
  std::string wrong_when_made_again() const;

  Death death_;
  SmallSession small_;
  Reduction reduction_;
  Session others_view_;
  Reduction others_reduction_;
  std::uint64_t attempt_ = 0;
  std::vector<std::byte> state_;  ///< That ranks write before their vote: the generator's, then the buffers'.
  Image before_;                  ///< Of an attempt that does not count.
  Image counted_;                 ///< Of one that does, undisturbed.
};

}  // namespace accelmgr::session
