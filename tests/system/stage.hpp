// A model and a data source that do what a test tells them to, when it tells them: through memory that the
// test shares with the runners and the manager.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "accelmgr/config.hpp"
#include "base/unique_fd.hpp"
#include "ipc/epoch.hpp"
#include "ipc/memory.hpp"

namespace accelmgr::test {

/// What a rank's model does in forward().
enum class Act : std::uint32_t {
  compute,
  block,  ///< Until the rank is given another act, which it then does.
  throw_exception,
  infinite_loss,
  undefined_gradient,  ///< Of output.bias alone; the loss is finite.
  vector_loss,
  write_parameter,    ///< output.bias
  replace_parameter,  ///< hidden.weight
  outlive_launcher,   ///< Its end does not end this process from now on.
};

/// The registered name of the model, and of the source.
inline constexpr const char* staged = "staged";

constexpr int staged_ranks = 2;
constexpr int most_staged_ranks = 3;
constexpr int staged_batch_size = 4;

/// What the test writes and the models read.
struct Script {
  std::atomic<Act> act[most_staged_ranks];   ///< test
  std::atomic<Act> once[most_staged_ranks];  ///< test: before that, but for `compute`. The model takes it.
  ipc::Epoch told;                           ///< test: advanced with every act.
  std::atomic<bool> blocked[most_staged_ranks];  ///< The rank's model: it sits in forward().
  ipc::Epoch heard;                              ///< ... advanced with that.
  std::atomic<std::int64_t> withheld_from;       ///< test: the source waits before this element; 0: nowhere.
  std::atomic<bool> withheld;  ///< The source: it waits there; `heard` is advanced with that.
};

/// The test's end. The memory has no name; others reach it through this process's entry in /proc.
class Stage {
 public:
  Stage();
  /// What models and sources are told of it.
  std::string path() const;
  /// What rank does from its next forward() on, or at once where it blocks.
  void tell(int rank, Act act);
  /// What it does in its next forward() alone.
  void tell_once(int rank, Act act);
  /// Returns when the rank blocks in forward(). Fails the test after a bound.
  void wait_until_blocked(int rank);
  /// Whether it does by now.
  bool blocks(int rank) const { return script_.blocked[rank].load(); }
  /// The source waits before it gives element `number`, until the others are released.
  void withhold_elements_from(std::int64_t number);
  /// Returns when the source waits there: all elements before are dealt. Fails the test after a bound.
  void wait_until_withheld();
  void release_elements();

 private:
  void wait_until(const std::atomic<bool>& heard, const std::string& what);

  base::UniqueFd fd_;
  ipc::Mapping map_;
  Script& script_;
};

/// Two runners of one thread each that train the staged model on the staged source, endless unless
/// `data.elements` is set. The source's `data.options` name elements by number: at `throw_at` it throws, at
/// `double_at` and `longer_at` it gives an input of another dtype and shape than declared. The model's option
/// `hidden` is its width, 16 unless it is set.
Config staged_config(const Stage& stage);
Config staged_config(const std::string& stage_path);

}  // namespace accelmgr::test
