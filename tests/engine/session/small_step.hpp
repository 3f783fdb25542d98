// One attempt of a small session, up to the section in which one of its ranks dies. It gives the contents of
// the shared memory, lets the other processes recover, and checks that the step counted in full or not at
// all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/session/parameter_update.hpp"
#include "engine/session/reduction.hpp"
#include "reduction_reference.hpp"

namespace accelmgr::session {

/// What the rank does when it dies.
enum class Section {
  last_vote,   ///< All other ranks have voted; none has reduced its slice.
  last_slice,  ///< The attempt is committed, and all other slices are reduced.
};

struct Death {
  int ranks;
  int rank;  ///< The rank that dies.
  bool accumulate;
  Section section;
  bool is_mixed = false;  ///< The model has all dtypes, and an unfrozen parameter. Otherwise it is float32.
  bool updates = false;   ///< The attempt updates the parameters.
};

class SmallStep {
 public:
  /// Brings the attempt to the beginning of the section. The session has two views, as in two processes.
  explicit SmallStep(const Death& death);

  /// Runs the rank's part of the section from where the rank stands to the end.
  void run_section();
  /// Does what other processes do after the death, in the supervisor's order. Each slice goes on from its
  /// cursor.
  void recover();
  /// As recover(), but without putting back the undo image of a chunk in flight.
  void recover_without_undo();

  /// A copy of everything in the session that the section or a recovery changes.
  struct Image {
    std::vector<std::byte> head;  ///< Control, rank records, state copies and undo images.
    std::vector<std::byte> gradients;
    std::vector<std::byte> updated;  ///< Parameters and moments.
    bool operator==(const Image&) const = default;
  };
  void take(Image& image);
  void put_back(const Image& image);

  /// True if the last vote is cast.
  bool committed() const;
  /// Call it after a recovery. Returns what is wrong, or an empty string. `was_committed` says whether the
  /// attempt was committed when the rank died. If it was not, all ranks make the step again, and it must
  /// count then.
  std::string wrong(bool was_committed);
  /// Compares the undisturbed run with plain arithmetic. Returns what is wrong, or an empty string.
  std::string undisturbed_wrong();

 private:
  RankMask participants() const noexcept { return all_ranks(death_.ranks); }
  void fill();
  std::uint64_t open();
  void vote(Session& session, const Reduction& reduction, int rank, std::uint64_t attempt);
  void finish(std::uint64_t attempt);
  static std::string difference(const Numbers& found, const Numbers& expected);
  std::string differs(const Image& expected, std::uint32_t index);
  std::string wrong_when_made_again();
  std::string wrong_updates(const Numbers& gradients);
  std::vector<std::byte> updated_memory();

  Death death_;
  SmallSession small_;
  Reduction reduction_;
  ParameterUpdate update_;
  Session others_view_;
  Reduction others_reduction_;
  ParameterUpdate others_update_;
  std::uint64_t attempt_ = 0;
  std::vector<std::byte> state_;  ///< What a rank writes before it votes: generator, buffers.
  Image before_;                  ///< The image that an uncounted attempt must leave.
  Image counted_;                 ///< The image of the undisturbed, counted attempt.
};

}  // namespace accelmgr::session
