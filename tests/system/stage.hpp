// A model and a data source that do what a test tells them to, when it tells them: through memory that the
// test shares with the runners and the manager.
#pragma once

#include <sys/types.h>

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
  fork_child,         ///< Which does nothing until it is killed.
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
  std::atomic<pid_t> child_of_model, child_of_source;  ///< Who forks it.
  std::atomic<bool> factories_held;                    ///< test: models are not made yet.
  std::atomic<pid_t> in_factory;                       ///< The process in which one waits for that.
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
  /// Models are not made until they are released.
  void hold_factories() { script_.factories_held.store(true); }
  void release_factories();
  /// The process that is to make a model, once it waits. Fails the test after a bound, as the next do.
  pid_t wait_until_in_factory() { return wait_until_set(script_.in_factory, "no model is made"); }
  pid_t child_of_model() { return wait_until_set(script_.child_of_model, "no model has forked a child"); }
  pid_t child_of_source() { return wait_until_set(script_.child_of_source, "no source has forked a child"); }

 private:
  template <class T>
  T wait_until_set(const std::atomic<T>& heard, const std::string& what);

  base::UniqueFd fd_;
  ipc::Mapping map_;
  Script& script_;
};

/// Two runners of one thread each that train the staged model on the staged source, endless unless
/// `data.elements` is set. The source's `data.options` name elements by number: at `throw_at` it throws, at
/// `double_at` and `longer_at` it gives an input of another dtype and shape than declared, at `fork_at` it
/// forks a child that does nothing. The model's option
/// `hidden` is its width, 16 unless it is set.
Config staged_config(const Stage& stage);
Config staged_config(const std::string& stage_path);

}  // namespace accelmgr::test
