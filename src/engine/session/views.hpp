// Who may write what in a session. Each kind of process has a view, with its own writes and no others.
//
// clang-format off
//   | view           | of                        | writes                                                   |
//   |----------------|---------------------------|----------------------------------------------------------|
//   | HostView       | the host's thread         | requests, parameters, gradients, moments, valid copies   |
//   |                |                           | of buffers, the step history, its spans                  |
//   | SupervisorView | the manager's main thread | team, states, incidents, its spans                       |
//   | LoaderView     | the manager's loader      | sharding, queues, its spans                              |
//   | CheckpointView | the checkpoint writer     | its spans                                                |
//   | RunnerView     | a runner                  | its record, slab, copies and spans; in an inner step its |
//   |                |                           | slice of parameters and moments                          |
// clang-format on
//
// All of them may change the step word (attempt.hpp), finish the slices of dead runners (reduction.hpp,
// parameter_update.hpp), wake other processes, and stop the session. The session must outlive its views.
#pragma once

#include <cstddef>
#include <span>

#include "engine/session/session.hpp"

namespace accelmgr::session {

class View {
 public:
  View(Session& session) noexcept : memory_(&session) {}
  const Session& session() const noexcept { return *memory_; }

  /// Wakes every process that waits on an epoch of this session. Async-signal-safe.
  void wake_everyone() const noexcept;
  /// Wakes the host: a runner is ready or has acknowledged an attempt, or a sharding has begun.
  void announce_readiness() const noexcept { ipc::advance(memory_->control().readiness); }
  /// Wakes those that wait until all slices are reduced.
  void announce_reduced() const noexcept { ipc::advance(memory_->control().finish); }
  void wake_for_readiness() const noexcept { ipc::wake_all(memory_->control().readiness); }
  void stop() const noexcept { memory_->control().stopping.store(1); }

 protected:
  Session& memory() const noexcept { return *memory_; }

 private:
  friend class Reduction;
  friend class ParameterUpdate;
  friend SharedControl& shared(const View& view) noexcept;  // attempt.cpp
  Session* memory_;
};

class HostView : public View {
 public:
  using View::View;
  HostControl& control() const noexcept { return memory().control(); }
  StepHistory& history() const noexcept { return memory().history(); }
  SpanRing& spans() const noexcept { return memory().spans(SpanThread::host); }
  /// Asks the loader to assign to other ranks, or with other shares.
  /// Requires: the loader has followed the last request.
  void ask_for(const Assignment& assignment) const noexcept;
  /// Keeps the update for later steps that no host makes.
  void keep_update(const Update& update) const noexcept;
  std::byte* parameters() const noexcept { return memory().parameters(); }
  std::byte* gradients() const noexcept { return memory().gradients(); }
  std::byte* snapshot() const noexcept { return memory().snapshot(); }
  /// The first moments of the parameters that are trained, then the second ones.
  std::byte* moments() const noexcept { return memory().moments(); }
  std::span<std::atomic<std::uint32_t>> unfrozen() const noexcept { return memory().unfrozen(); }
  std::span<UpdatedTensor> updated() const noexcept { return memory().updated(); }
  // The state copies may be written only while no attempt is open.
  std::byte* generator(std::uint32_t index, int rank) const noexcept {
    return memory().generator(index, rank);
  }
  std::byte* buffers(std::uint32_t index, int rank) const noexcept { return memory().buffers(index, rank); }
  std::byte* result_buffers(std::uint32_t index) const noexcept { return memory().result_buffers(index); }
};

/// What a host was writing when it ended.
struct HalfWritten {
  bool parameters = false;
  bool buffers = false;
};

class SupervisorView : public View {
 public:
  using View::View;
  SupervisorControl& control() const noexcept { return memory().control(); }
  SupervisorRecord& record(int rank) const noexcept { return memory().record(rank); }
  Incident& incident(std::uint64_t number) const noexcept { return memory().incident(number); }
  SpanRing& spans() const noexcept { return memory().spans(SpanThread::supervisor); }
  /// Call it before starting a runner of that rank. The incident keeps what its predecessor wrote.
  void clear_record(int rank) const noexcept;
  /// Takes over the session of a manager that has ended: no rank has a runner, and given_up and stopping are
  /// reset.
  void take_over() const noexcept;
  /// Makes the fields of a host that has ended usable for the next one: ends unfinished writes, advances the
  /// version of the parameters, and takes back a request to the loader that was not complete.
  /// Requires: no process of that host is left, and no attempt is open.
  HalfWritten settle_host() const noexcept;
};

class LoaderView : public View {
 public:
  using View::View;
  Sharding& sharding() const noexcept { return memory().sharding(); }
  Queue& queue(int rank) const noexcept { return memory().queue(rank); }
  SpanRing& spans() const noexcept { return memory().spans(SpanThread::loader); }
};

class CheckpointView : public View {
 public:
  using View::View;
  SpanRing& spans() const noexcept { return memory().spans(SpanThread::checkpoint_writer); }
};

class RunnerView : public View {
 public:
  RunnerView(Session& session, int rank) noexcept : View(session), rank_(rank) {}
  int rank() const noexcept { return rank_; }
  RunnerRecord& record() const noexcept { return memory().record(rank_); }
  SpanRing& spans() const noexcept { return memory().runner_spans(rank_); }
  std::byte* generator(std::uint32_t index) const noexcept { return memory().generator(index, rank_); }
  std::byte* buffers(std::uint32_t index) const noexcept { return memory().buffers(index, rank_); }
  std::span<Tag> tags() const noexcept { return memory().tags(rank_); }
  std::byte* slab() const noexcept { return memory().slab(rank_); }
  /// For replicas that use the parameters where they lie. Read-only with `runners.protect_parameters`.
  std::byte* parameters() const noexcept { return memory().parameters(); }

 private:
  int rank_;
};

}  // namespace accelmgr::session
