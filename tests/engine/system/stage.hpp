// A model and a data source that a test controls through memory shared with the runners and the manager.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "accelmgr/config.hpp"
#include "base/ipc/epoch.hpp"
#include "base/ipc/memory.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::test {

/// What a rank's model does in forward().
enum class Act : std::uint32_t {
  compute,
  block,  ///< Wait until the rank is given another act, then do that.
  throw_exception,
  infinite_loss,
  undefined_gradient,  ///< NaN in the gradient of output.bias alone; the loss is finite.
  write_parameter,     ///< Write to output.bias.
  fork_child,          ///< Fork a child that does nothing until it is killed.
  execute_child,       ///< Execute another program as a child, which does nothing until it is killed.
};

/// The registered name of the model and of the source.
inline constexpr const char* staged = "staged";
/// The same model with parameters of bfloat16, complex64, float16, float32 and float64. The acts that write
/// to it do nothing.
inline constexpr const char* mixed_dtypes = "mixed_dtypes";
/// That model on the transport for devices.
inline constexpr const char* mixed_dtypes_on_fake_device = "mixed_dtypes_on_fake_device";
/// The same model on the transport for devices (engine/support/fake_device_replica.hpp).
inline constexpr const char* staged_on_fake_device = "staged_on_fake_device";

/// The same model on what the rank's `runners.device` says: the CPU, or the transport for devices with NCCL
/// between the processes (nccl_faults.hpp).
inline constexpr const char* staged_by_device = "staged_by_device";

constexpr int staged_ranks = 2;
constexpr int most_staged_ranks = 4;
constexpr int staged_batch_size = 4;

/// The shared memory of a stage. Each comment says who writes the field.
struct Script {
  std::atomic<Act> act[most_staged_ranks];   ///< Test: what each rank does.
  std::atomic<Act> once[most_staged_ranks];  ///< Test: before that, unless `compute`. The model resets it.
  ipc::Epoch told;                           ///< Test: advanced with every act.
  std::atomic<bool> blocked[most_staged_ranks];  ///< Model: the rank waits in forward().
  ipc::Epoch heard;                              ///< Model, source, factory: advanced with their fields.
  std::atomic<std::int64_t> withheld_from;       ///< Test: the source waits before this element; 0: nowhere.
  std::atomic<bool> withheld;                    ///< Source: it waits there.
  /// Parent: the child that user code forked or executed.
  std::atomic<pid_t> child_of_model, child_of_source;
  std::atomic<bool> factories_held;  ///< Test: no model may be made yet.
  std::atomic<pid_t> in_factory;     ///< Factory: the process that waits for the release.
};

/// An option of a model or a source, or `otherwise` if it is not set.
inline std::string option_of(const std::map<std::string, std::string>& options, const char* name,
                             const char* otherwise) {
  const auto found = options.find(name);
  return found == options.end() ? otherwise : found->second;
}

/// Maps the script in a model or a source. Throws SystemError.
ipc::Mapping open_script(const std::string& path);
Script& script_in(const ipc::Mapping& map);
/// A waiting process looks at the script at least this often.
constexpr std::int64_t stage_slice_ns = 20'000'000;
/// Forks a child as user code may, `apart` in a session of its own. It does nothing until it is killed, and
/// ends after two minutes if no process kills it.
void fork_child(Script& script, std::atomic<pid_t>& child, bool apart = false);
/// Executes `sleep`, which inherits what this process has. Throws SystemError.
pid_t execute_sleep(const char* seconds, char* const* environment);
/// Executes another program, which does that too. Unlike subprocess of Python it closes no descriptors.
void execute_child(Script& script, std::atomic<pid_t>& child);

/// The test's side. The memory has no name; other processes open it through this process's entry in /proc.
class Stage {
 public:
  Stage();
  /// The path that models and sources get.
  std::string path() const;
  /// What `rank` does from its next forward() on, or at once if it blocks.
  void tell(int rank, Act act);
  /// What `rank` does in its next forward() only.
  void tell_once(int rank, Act act);
  /// Returns when the rank blocks in forward(). Fails the test after a time limit.
  void wait_until_blocked(int rank);
  /// True while the rank blocks in forward().
  bool blocks(int rank) const { return script_.blocked[rank].load(); }
  /// The source waits before it gives element `number`, until release_elements().
  void withhold_elements_from(std::int64_t number);
  /// Returns when the source waits there; all elements before are then assigned. Fails the test after a time
  /// limit.
  void wait_until_withheld();
  void release_elements();
  /// No process makes a model until release_factories().
  void hold_factories() { script_.factories_held.store(true); }
  void release_factories();
  /// Returns the process that waits to make a model, as soon as one waits. Fails the test after a time limit,
  /// like the next two.
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

/// Two runners of one thread each that train the staged model on the staged source. The source is endless
/// unless `data.elements` is set. The source's `data.options` name elements by number: it throws at
/// `throw_at`, forks a child that does nothing at `fork_at`, and executes one at `execute_at`. The model's
/// option `hidden` is its width, by default 16. With its option `forks_in_factory` the manager's model forks
/// a child in a session of its own while it is made.
Config staged_config(const Stage& stage);
Config staged_config(const std::string& stage_path);

}  // namespace accelmgr::test
