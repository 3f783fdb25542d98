// NCCL behind its table, on the streams of the FakeCuda of this process. Ranks are in one process, on one
// thread or on several, or in several processes. An operation begins when it has come to the front of the
// streams of all ranks, and sums up in an order of ranks that nobody can foresee. Calls return before they
// are done. It fails on demand, and tells what NCCL would not: mismatches, calls that are not allowed, and
// what was not given back.
//
// It cannot prove bandwidth, memory, how long making a communicator takes, or that a real abort ends a kernel
// that waits for a dead peer. The real library was only loaded.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "base/cuda/nccl.hpp"
#include "engine/support/fake_nccl_team.hpp"
#include "fake_library.hpp"

namespace accelmgr::test {

/// One process has at most one at a time. A FakeCuda is there as long as it is used; it must execute in
/// threads where ranks are in several processes. A group may have sends and receives of one communicator, all
/// ranks take part in it, and each pair exchanges at most one message each way.
class FakeNccl : public FakeLibrary<device::NcclCode> {
 public:
  /// When the first operation of a communicator is on its stream.
  enum class FirstOperation {
    soon,        ///< After a few polls.
    when_asked,  ///< When all ranks have made the call, as NCCL connects ranks then.
  };

  explicit FakeNccl(std::uint64_t seed = 0, FirstOperation first = FirstOperation::soon);
  ~FakeNccl();
  FakeNccl(const FakeNccl&) = delete;
  FakeNccl& operator=(const FakeNccl&) = delete;

  /// The table of the fake.
  static device::Nccl table();
  /// The one of this process. If there is none, makes one that stays until the process ends, and ends it with
  /// SIGABRT at the first mismatch or misuse.
  static FakeNccl& of_process();

  // Faults. Without them, what happens to a rank is not told to the others: they wait for ever.

  /// The communicators of that rank report `code` from now on.
  void fail_asynchronously(int rank, device::NcclCode code) {
    locked([&] { asynchronous_[rank] = code; });
  }
  /// From now on the other ranks of an aborted communicator report a remote error.
  void tell_of_aborts() { write(tells_, true); }
  /// Calls of the function do not return until release(), or until the fake ends. They fail then.
  void hang(const std::string& function) {
    locked([&] { hangs_[function] = true; });
  }
  void release();

  // What the test looks at.

  /// What ranks did differently from the first one that made the call.
  std::vector<std::string> mismatches() { return read(mismatches_); }
  /// Calls that NCCL forbids: with a communicator that is busy or gone, of memory that is not the device's, a
  /// destroy without a finalize, an unfinished group.
  std::vector<std::string> misuses() { return read(misuses_); }
  /// Communicators that were neither aborted nor destroyed.
  int live();

 private:
  friend struct FakeNcclFunctions;
  struct Communicator;

  device::NcclCode enter(const char* function);
  Communicator& state_of(device::CommunicatorHandle handle);
  bool usable(const char* function, Communicator& communicator);
  device::NcclCode init(device::CommunicatorHandle* handle, int size, const device::NcclId& id, int rank,
                        const device::NcclConfig& config);
  device::NcclCode issue(const char* function, Communicator& communicator, device::StreamHandle stream,
                         const fake_nccl::Signature& signature, fake_nccl::Share share);
  bool in_progress(Communicator& communicator);
  device::NcclCode error_of(const Communicator& communicator) const;
  device::NcclCode end(const char* function, device::CommunicatorHandle handle);
  void misuse(const char* function, const char* what);
  void note(std::vector<std::string>& list, const std::string& text) const;

  const FirstOperation first_;
  bool ends_process_ = false;
  std::condition_variable changed_;
  // Guarded by the mutex.
  std::mt19937_64 random_;
  bool released_ = false, tells_ = false;
  int hanging_ = 0;
  std::vector<base::UniqueFd> ids_;  ///< Of teams, which exist as long as these are open.
  std::vector<std::unique_ptr<Communicator>> communicators_;  ///< Handles are addresses; none is used twice.
  std::map<std::string, std::weak_ptr<fake_nccl::Team>> teams_;  ///< By their ids. Ranks share a mapping.
  std::map<int, device::NcclCode> asynchronous_;
  std::map<std::string, bool> hangs_;
  std::vector<std::string> mismatches_, misuses_;
};

}  // namespace accelmgr::test
