// The byte map of a session: plain data in shared memory, and where each part lies. It has no behaviour.
//
// clang-format off
//   session memfd (offsets in Header, regions 64-byte aligned, the big ones 2 MiB)
//   +--------+---------+------------+----------+-----------+---------+----------+----------------+------+--------+------------+------------+-----------+---------+
//   | Header | Control | RankRecord | Sharding | Incident  | Step    | manifest | state copies   | undo | queues | SpanRing   | parameters | gradients | moments |
//   |        |         | [24]       |          | [4]       | History | unfrozen,| x2             |      |        | [ranks + 4]| (snapshot) |    (room) | (x2)    |
//   +--------+---------+------------+----------+-----------+---------+----------+----------------+------+--------+------------+------------+-----------+---------+
//                                                                    per copy: Counters, updates of each tensor, per rank: generator, buffers; result buffers
//   slab memfd, one per rank, allocated when the rank is first in the team
//   +---------------+-----------------------------+
//   | tag[tensors]  | gradients            (room) |
//   +---------------+-----------------------------+
// clang-format on
//
// Parameters, gradients and slabs have the same order of tensors (Manifest::place_tensors()); the gaps
// between them are always zero. Parameters that are frozen at the start come last. Those that can be trained
// have room for gradients, which takes no memory until they are unfrozen. Moments are the state of the inner
// steps' optimizer; they take no memory until there is one. Every structure but SharedControl has one
// writer, which writes it through its view (views.hpp); when the writer has died, another process finishes
// its part. The manager's main thread initializes all of them before other processes map the session.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "accelmgr/dtype.hpp"
#include "accelmgr/step_result.hpp"
#include "base/ipc/epoch.hpp"
#include "engine/session/step_word.hpp"

namespace accelmgr::session {

constexpr std::uint64_t magic = 0x52474d4c45434341ull;  // "ACCELMGR"
constexpr std::uint32_t layout_version = 22;
constexpr std::size_t region_alignment = 64;
constexpr std::size_t big_region_alignment = std::size_t{2} << 20;
/// Master gradients are undone in units of this size. Images of 2 to 4 KiB cost 3 to 10% of the reduction, of
/// 16 KiB 16%, of 1 MiB 58%.
constexpr std::size_t chunk_bytes = 4096;
/// The image of a part of a slice: a chunk's gradients, or its new values, first and second moments.
constexpr std::size_t image_bytes = 3 * chunk_bytes;
constexpr int max_parts = 16;                  ///< Threads of a runner that reduce its slice together.
constexpr std::size_t generator_bytes = 5120;  ///< Holds the state of torch's CPU generator (5056 bytes).
constexpr std::size_t text_bytes = 4096;
constexpr std::size_t log_tail_bytes = 2048;
constexpr std::size_t source_state_bytes = 256 * 1024;
constexpr std::size_t row_guard_bytes = 64;      ///< Behind each row of a slot: unused, or a later row.
constexpr std::size_t queue_guard_bytes = 4096;  ///< Unused bytes behind the slots of a queue.
constexpr std::uint64_t max_incidents = 4;       ///< The session keeps the last incidents, up to this number.
constexpr std::uint64_t max_step_records = 256;  ///< It keeps records of the last calls of step().
constexpr std::uint64_t max_spans = 2047;        ///< It keeps the last spans of each thread.
constexpr int max_scalars = 16;
constexpr std::size_t scalar_name_bytes = 48;
constexpr std::size_t max_update_groups = 16;
constexpr std::size_t team_id_bytes = 128;  ///< The size of NCCL's ids.

/// The type in which gradients are stored and added. A complex number is two elements.
enum class Element : std::uint32_t { f32, f64, bf16, f16 };

constexpr std::size_t bytes_of(Element e) noexcept {
  return e == Element::f64 ? 8 : e == Element::f32 ? 4 : 2;
}

constexpr DType dtype_of(Element e) noexcept {
  constexpr DType dtypes[]{DType::float32, DType::float64, DType::bfloat16, DType::float16};
  return dtypes[static_cast<std::size_t>(e)];
}

/// Sizes that follow from the tensors of a model, in bytes.
struct TensorBytes {
  std::uint64_t parameters = 0;
  std::uint64_t trained = 0;              ///< Parameters that are trained from the start.
  std::uint64_t gradients = 0;            ///< The gradients of these parameters.
  std::uint64_t gradient_room = 0;        ///< With the room for those of frozen parameters.
  std::uint64_t slab = 0, slab_room = 0;  ///< The same in a slab.
  bool operator==(const TensorBytes&) const = default;
};

/// Written by the manager before it starts runners; constant afterwards.
struct Header {
  std::atomic<std::uint64_t> magic;  ///< Stored last: a process that reads it sees a complete session.
  std::uint32_t layout_version;
  std::uint32_t ranks;
  std::uint64_t fingerprint;  ///< build_fingerprint(); another build cannot attach.
  std::uint64_t total_bytes;  ///< Size of the session memfd, with the room.
  TensorBytes bytes;
  std::uint64_t tensors;
  std::uint64_t buffer_bytes;     ///< Bytes of one copy of all buffers.
  std::uint64_t slots;            ///< Slots of each queue.
  std::uint64_t has_snapshot;     ///< 1: there is room for another copy of the parameters.
  std::uint64_t keeps_last_step;  ///< 1: queues keep the batches of the last step (`data.keep_last_step`).
  std::uint64_t slot_bytes;
  std::uint64_t batch_size;        ///< The most elements that a slot holds.
  std::uint64_t slab_bytes;        ///< Size of each slab memfd, with the room.
  std::uint64_t slab_data_offset;  ///< Offset of the gradients in a slab memfd.
  // Offsets of the regions, and sizes of some.
  std::uint64_t control, records, sharding, incidents, history, manifest, manifest_bytes, unfrozen, updated,
      copies, copy_bytes, undo, queues, queue_bytes, spans, parameters, snapshot, gradients, moments;
};

/// Why a runner refuses an attempt.
enum class Reason : std::uint32_t {
  none,
  exception,
  model_error,
  nonfinite,
  data_end,
  data_error,
  parameters_changed,
  overflow,           ///< A gradient is not finite, and the loss scale may be the cause.
  team,               ///< The team of devices could not be made, or failed; the rank itself goes on.
  lost_with_another,  ///< As team, but the rank ends: a rank that was lost before has broken its device.
};

/// Whether a runner ends after it has refused an attempt for this reason.
constexpr bool ends_runner(Reason reason) noexcept {
  return reason == Reason::exception || reason == Reason::model_error || reason == Reason::lost_with_another;
}

/// The scale of the loss under `runners.autocast: fp16`, as committed steps left it
/// (engine/client/loss_scaler.hpp).
struct LossScale {
  double scale;              ///< The next step begins with it; 0: no step has had one.
  std::uint64_t good_steps;  ///< How many steps in a row were committed with this scale and finite values.
};

/// How many micro-batches each rank computes in a step.
struct Shares {
  std::uint32_t of[max_ranks];
  bool operator==(const Shares&) const = default;
};

constexpr Shares even_shares(std::uint32_t each) noexcept {
  Shares shares{};
  for (auto& share : shares.of) share = each;
  return shares;
}

/// Micro-batches of a full step of these ranks.
constexpr std::uint64_t total_of(const Shares& shares, RankMask ranks) noexcept {
  std::uint64_t total = 0;
  for (int rank = 0; rank < max_ranks; ++rank)
    if ((ranks >> rank & 1) != 0) total += shares.of[rank];
  return total;
}

/// Which ranks get elements, and for how many micro-batches of a step.
struct Assignment {
  RankMask team;
  Shares shares;
  bool operator==(const Assignment&) const = default;
};

/// The id by which the members of a team of devices find each other. Only their transport knows what is in
/// it.
using TeamId = std::array<std::byte, team_id_bytes>;

/// Participants whose devices sum up their gradients (engine/session/device_team.hpp).
struct DeviceTeam {
  RankMask ranks = 0;  ///< 0: there is no team; all ranks reduce through the session.
  /// The attempt in which these ranks made their communicator; 0: they make one in this attempt.
  std::uint64_t communicator = 0;
  bool operator==(const DeviceTeam&) const = default;
};

/// A field of the request that a supervisor or an observer may read while the host writes the next request.
/// Loads acquire: no later read moves before one.
template <typename T>
class Shared {
 public:
  Shared(T value = {}) noexcept : value_(value) {}
  Shared(const Shared& other) noexcept : value_(T(other)) {}
  Shared& operator=(const Shared& other) noexcept {
    value_.store(T(other), std::memory_order_relaxed);
    return *this;
  }
  ~Shared() = default;
  operator T() const noexcept { return value_.load(std::memory_order_acquire); }

 private:
  std::atomic<T> value_;
};

/// The divisor of losses and gradients: `loss_scaling`.
enum class LossWeights : std::uint32_t { micro_batches, samples, none, field };

/// Who applies the gradients of an attempt.
enum class Applies : std::uint32_t {
  host,        ///< The host, with the mean gradients in the master.
  session,     ///< All participants, in slices, before the attempt is closed (parameter_update.hpp).
  replicas,    ///< Each replica, with the master's gradients, before it acknowledges the attempt.
  one_replica  ///< The only participant's replica, with its own gradients: the master's do not change.
};

/// The state of an optimizer: how many moments of each parameter the session holds.
enum class Moments : std::uint32_t { none, first, both };

/// The settings of a parameter group, as torch.optim has them.
struct UpdateGroup {
  double learning_rate = 0;
  double weight_decay = 0;
  double momentum = 0;                       ///< sgd
  double beta1 = 0, beta2 = 0, epsilon = 0;  ///< adam, adamw
  std::uint64_t nesterov = 0;                ///< sgd
};

/// How the learning rates of all groups change: they rise linearly, then stay, or fall as half a cosine.
struct RateSchedule {
  std::int64_t warmup_updates = 0;
  std::int64_t total_updates = 0;  ///< Updates until the cosine ends, with the warmup; 0: there is no cosine.
  double final_ratio = 1;          ///< The cosine's last rate, divided by the highest one.

  /// The rate of an update, which is counted from 0.
  double rate(double highest, std::int64_t update) const noexcept;
};

/// The update of an attempt whose gradients the session applies.
struct Update {
  enum class Kind : std::uint32_t { sgd, adam, adamw };
  Kind kind = Kind::adamw;
  /// 1: a parameter without a gradient in this attempt is left alone. 0: its gradient is zero.
  std::uint32_t leaves_absent = 0;
  double clip_norm = 0;  ///< 0: no clipping.
  double divisor = 1;    ///< Gradients are divided by this before they are clipped.
  RateSchedule schedule{};
  UpdateGroup groups[max_update_groups]{};

  Moments moments() const noexcept {
    if (kind != Kind::sgd) return Moments::both;
    for (const auto& group : groups)
      if (group.momentum != 0) return Moments::first;
    return Moments::none;
  }
};

/// What an update knows of a parameter. Written by the host.
struct UpdatedTensor {
  std::uint64_t group;           ///< no_update_group: it is not updated.
  std::uint64_t updates_before;  ///< How many updates it had before this session's first, modulo 2^64.
};
constexpr std::uint64_t no_update_group = ~std::uint64_t{0};

/// The host's request for an attempt. The host writes it while the step word is closed.
struct Request {
  Shared<RankMask> participants;
  std::uint32_t accumulate = 0;  ///< 1: master += mean gradient; 0: master = mean gradient.
  Shares shares{};               ///< The shares of the sharding.
  std::uint32_t batch_size = 0;
  LossWeights loss_weights = LossWeights::micro_batches;
  std::uint32_t mean_buffers = 0;      ///< 1: `buffers.policy: mean`.
  std::uint32_t refuse_nonfinite = 0;  ///< 1: runners refuse the attempt at a non-finite loss or gradient.
  std::uint32_t refuse_overflow = 0;   ///< 1: they refuse with Reason::overflow if the loss is finite.
  std::uint32_t skip = 0;              ///< 1: consume the batches and change nothing else.
  std::uint32_t repeat = 0;  ///< 1: compute on the batches of the last committed attempt, and consume none.
  /// The rank whose replica makes the call that the host has left for it, plus 1; 0: no call. `skip` and
  /// `repeat` are then set too, so that nothing else happens.
  std::uint32_t call = 0;
  Shared<Applies> applies = Applies::host;
  Update update{};  ///< For Applies::session.
  DeviceTeam device_team{};
  std::uint64_t parameter_version = 0;
  double loss_scale = 1;        ///< A power of two. It multiplies the gradients in slabs, not the master's.
  LossScale next_loss_scale{};  ///< The next step's scale if this one commits with finite values.
};

/// Written by all processes: the step word through the transitions of step_word.hpp, the epochs to wake
/// others. Aborting, losing a runner and stopping advance all four epochs.
struct SharedControl {
  alignas(64) std::atomic<std::uint64_t> word;
  ipc::Epoch trigger;  ///< Advanced when an attempt opens. Runners wait on it.
  ipc::Epoch votes;    ///< Advanced by the last vote. Participants wait on it.
  /// Advanced when an attempt is closed or reduced, woken for another assignment. Host, loader, and runners
  /// that start, update or apply wait on it.
  ipc::Epoch finish;
  ipc::Epoch readiness;  ///< See View::announce_readiness(). The host waits on it before it opens an attempt.
  alignas(64) std::atomic<std::uint32_t> stopping;
};

/// Written by the host. When the host of a service has ended, the supervisor ends what it left half written
/// (SupervisorView::settle_host()).
struct HostControl {
  alignas(64) Request request;
  alignas(64) std::atomic<std::uint64_t> parameter_version;  ///< Odd while parameters are being written.
  /// Advanced after a write of frozen parameters, before the next attempt.
  std::atomic<std::uint64_t> frozen_version;
  std::atomic<std::uint64_t> buffer_version;  ///< Advanced before and after the host writes valid copies of
                                              ///< buffers: odd while it does.
  /// The gradients in the master are those of the committed steps after this one.
  std::atomic<std::uint64_t> zeroed_step;
  /// The last step after which a host has begun to write parameters, or to zero the gradients.
  std::atomic<std::uint64_t> host_applied_step;
  std::atomic<std::uint64_t>
      writes;  ///< How often the caller itself has marked a write of parameters as whole.
  /// 1: the snapshot has the parameters as they were before the last write.
  std::atomic<std::uint32_t> snapshot_is_whole;
  std::atomic<std::uint64_t> snapshot_applied_step;  ///< `host_applied_step` of the snapshot's parameters.
  /// Bytes of the gradients of unfrozen parameters, on top of TensorBytes::gradients; and in each slab, on
  /// top of TensorBytes::slab.
  std::atomic<std::uint64_t> unfrozen_bytes, unfrozen_slab_bytes;
  /// updates[updates_asked % 2] is the update of the last inner step that a host has asked for. updates_asked
  /// 0: none was.
  Update updates[2];
  std::atomic<std::uint64_t> updates_asked;
  /// The moments that have memory, and those that the last optimizer has used.
  std::atomic<Moments> moments_allocated, moments_used;
  alignas(64) Assignment assignment;       ///< To which ranks the loader should assign.
  std::atomic<std::uint64_t> assignments;  ///< Advanced after `assignment` has changed. `assignment` may
                                           ///< change again when the loader has followed (Sharding::follows).
};

/// Written by the supervisor.
struct SupervisorControl {
  alignas(64) std::atomic<RankMask> team;   ///< The ranks that are to take part in the next attempt.
  std::atomic<std::uint32_t> given_up;      ///< 1: the supervisor replaces no more runners.
  char given_up_why[256];                   ///< The limit that was reached, or why no other would do better.
  std::atomic<std::uint64_t> incidents;     ///< Counts incidents; the ring holds the last max_incidents.
  std::atomic<std::uint64_t> replacements;  ///< Runners started in the place of lost ones.
  std::atomic<std::uint32_t> managers;      ///< How many managers took over the session from another one.
  /// Which host may drive the session: the number of its lease. 0: none.
  std::atomic<std::uint64_t> lease;
  /// 1: a host has ended while it wrote parameters, and none has marked a write as whole since.
  std::atomic<std::uint32_t> half_written;
  std::atomic<std::uint32_t> closing;  ///< 1: the service ends, and no attempt may be opened any more.
  /// How many checkpoints the host was asked to write, with its optimizer.
  std::atomic<std::uint64_t> checkpoint_requests;
};

struct Control : SharedControl, HostControl, SupervisorControl {};

enum class Phase : std::uint32_t {
  none,
  init,
  waiting,
  data,
  forward,
  backward,
  vote,
  reduce,
  update,  ///< Of parameters, in an inner step.
  stopping
};
const char* to_string(Phase phase) noexcept;

enum class RunnerState : std::uint32_t { absent, starting, ready, retiring, lost };

struct Scalar {
  char name[scalar_name_bytes];
  double sum;
};

/// The largest magnitude of gradients, as a fraction of a type's largest finite number. Infinite if a
/// gradient is not finite.
struct SumRange {
  double sum;     ///< Relative to the range of the type in which slabs are added.
  double master;  ///< Relative to the range of the master's type.
};

/// The results of a runner in an attempt. It writes them before its vote.
struct Ballot {
  double loss;    ///< Weighted sum over its micro-batches (see engine/session/attempt.hpp).
  double weight;  ///< LossWeights::field: the sum of that field of the model's outputs. Otherwise 0.
  std::uint64_t samples;
  std::uint64_t elements;  ///< Elements taken from the source: computed, skipped, or left out before.
  std::uint32_t micro_batches;
  std::uint32_t nonfinite;
  std::uint64_t parameter_version;
  SumRange range;            ///< Of its slab.
  std::uint64_t compute_ns;  ///< Time of forward, backward and gradient capture.
  std::uint64_t data_ns;     ///< Time of waiting for batches.
  std::uint32_t scalars;
  Scalar scalar[max_scalars];
};

/// Says in which attempt a rank has last had a gradient of a tensor, and which elements of it are in the
/// rank's slab. Where devices have summed up the gradients of a team, each slab has a part of the sum
/// (engine/session/shards.hpp). Written by the runner before its vote.
class Tag {
 public:
  /// All elements, and the gap behind them.
  static constexpr std::uint64_t to_the_end = ~std::uint64_t{0};

  void store(std::uint64_t attempt, std::uint64_t first = 0, std::uint64_t end = to_the_end) noexcept {
    first_ = first;
    end_ = end;
    attempt_.store(attempt, std::memory_order_release);
  }
  std::uint64_t load() const noexcept { return attempt_.load(std::memory_order_acquire); }
  // Valid if load() returns the attempt that is reduced.
  std::uint64_t first() const noexcept { return first_; }
  std::uint64_t end() const noexcept { return end_; }

 private:
  std::atomic<std::uint64_t> attempt_;
  std::uint64_t first_, end_;
};

/// The last log lines of a process: byte i of all that it ever logged is at i mod sizeof(text).
struct LogTail {
  std::atomic<std::uint64_t> written;
  char text[log_tail_bytes - 8];
};

/// What a runner says of its device and teams. All but the id change only between the runner's attempts.
struct TeamRecord {
  std::atomic<std::uint32_t> able;          ///< 1: its device can be in a team.
  std::atomic<RankMask> ranks;              ///< The ranks of its communicator; valid if it has one.
  std::atomic<std::uint64_t> communicator;  ///< The attempt that made the communicator; 0: it has none.
  /// The attempt whose team has `id`; 0 while `id` is written. Only the lowest rank of a team writes one.
  std::atomic<std::uint64_t> id_of;
  std::atomic<std::uint64_t> id[team_id_bytes / 8];
};

/// The cursor of a part of a slice, alone in its cache line because its thread moves it all the time.
struct alignas(64) PartCursor {
  std::atomic<std::uint64_t> bits;
};

/// Written by the runner of a rank. The supervisor resets `phase` and `log` before it starts one, so what
/// they hold after the runner's end is that runner's own.
struct RunnerRecord {
  alignas(
      64) std::atomic<std::uint64_t> cursor;  ///< Cursor of the reduction; of the first part if the slice has
                                              ///< several. At its end when all parts are. After the runner's
                                              ///< death the process that finishes the slice writes it.
  PartCursor more_cursors[max_parts - 1];     ///< The cursors of the other parts.
  PartCursor update_cursors[max_parts];       ///< The cursors of the update of parameters.
  /// The sum of the squares of the gradients in its slice, if the update clips. Written before `cursor` is at
  /// its end.
  std::atomic<double> squares;
  alignas(64) std::atomic<Phase> phase;
  std::atomic<std::uint64_t> heartbeat;  ///< Grows when a phase begins, and again and again in a wait.
  std::atomic<std::uint64_t> attempt;    ///< The last attempt that it began.
  std::atomic<std::uint64_t> acknowledged_attempt;  ///< The last attempt whose end it saw: its working state
                                                    ///< is that of the valid copies.
  std::atomic<double> grad_norm;         ///< StepResult::grad_norm of the last step that its replica applied.
  std::atomic<std::uint64_t> reduce_ns;  ///< Duration of its last reduction.
  std::atomic<std::uint64_t> start_ns;   ///< From its fork until it was ready.
  std::atomic<std::uint64_t> model_ns;   ///< The part of start_ns that building the model took.
  alignas(64) Ballot ballot;
  alignas(64) TeamRecord device_team;
  alignas(64) std::atomic<Reason> reason;  ///< Why it refused attempt `reason_attempt`.
  std::atomic<std::uint64_t> reason_attempt;
  char error[text_bytes];
  alignas(64) LogTail log;
};

/// Written by the supervisor, for each rank.
struct SupervisorRecord {
  alignas(64) std::atomic<RunnerState> state;
  std::atomic<std::int32_t> pid;
  std::atomic<std::uint32_t> generation;
  std::atomic<std::int32_t> exit_status;  ///< As waitpid gives it; valid when `state` is lost.
};

struct RankRecord : RunnerRecord, SupervisorRecord {};

/// A number that one thread may read while another one writes it. Loads acquire: no later read moves before
/// one.
class Count {
 public:
  Count() noexcept = default;
  Count(const Count& other) noexcept : value_(std::uint64_t{other}) {}
  Count& operator=(const Count& other) noexcept { return *this = std::uint64_t{other}; }
  Count& operator=(std::uint64_t value) noexcept {
    value_.store(value, std::memory_order_relaxed);
    return *this;
  }
  operator std::uint64_t() const noexcept { return value_.load(std::memory_order_acquire); }

 private:
  std::atomic<std::uint64_t> value_;
};

/// The committed state besides tensors and generators. There are two copies; the step word's index names the
/// valid one. The other one is written while the last step is reduced: read_counters() reads what belongs
/// together.
struct Counters {
  Count steps;
  Count samples;
  Count skips;         ///< Attempts whose batches were consumed without a step.
  Count elements;      ///< Data cursor: committed attempts consumed the source's first `elements`.
  Count participants;  ///< RankMask of the last committed attempt.
  Count updated_step;  ///< The last step whose attempt has updated the parameters.
  LossScale loss_scale;
  /// A bound of the gradients that steps have written into the master (SumRange::master). It does not cover
  /// what the host writes there.
  double gradient_range;
  Count rank_samples[max_ranks];
  Count batches[max_ranks];  ///< Batches of each queue that committed attempts consumed.
  // What the last step consumed, which an attempt may repeat. 0 after a skip and after a resume.
  Count last_elements;
  Count last_batches[max_ranks];
};

/// The state of the source before it gave `element`, so that another one can continue from there. 0 and no
/// bytes: the source's beginning.
struct SourceState {
  std::uint64_t element;
  std::uint64_t bytes;
  char state[source_state_bytes];
};

/// How the elements that are not consumed yet are assigned: from element `first_element` on, in turn, to the
/// ranks of `assigned_to`, for as many micro-batches of each step as `shares` says
/// (engine/data/sharding.hpp). The first batch of this sharding has the number first_batch[rank]. Written by
/// the loader. It begins another sharding only when the host asks for one; the host opens no attempt until
/// that is done.
struct Sharding {
  std::atomic<RankMask> assigned_to;   ///< 0 while another sharding begins.
  std::atomic<std::uint64_t> follows;  ///< The value of HostControl::assignments that this sharding is for.
  Shares shares;
  std::atomic<std::uint32_t>
      source_index;  ///< The valid one of `source`: a state at or before the data cursor.
  std::uint64_t first_element;
  std::uint64_t first_batch[max_ranks];
  SourceState source[2];
};

/// The loss of a process: what its record said then, and what the supervisor knows. Incident i is at
/// (i - 1) mod max_incidents. The supervisor writes it before Control::incidents counts it.
struct Incident {
  std::int64_t time_ns;  ///< Since 1970, UTC.
  std::int32_t rank;     ///< -1: the fork server.
  std::int32_t pid;
  std::uint32_t generation;
  std::int32_t exit_status;  ///< As waitpid gives it.
  Phase phase;
  Reason reason;
  std::uint64_t step;
  std::uint64_t attempt;
  char what[text_bytes];  ///< Text of its exception, or why the supervisor killed it.
  char log[log_tail_bytes];
};

/// What a call of step() came to, as in StepResult.
struct StepRecord {
  std::int64_t time_ns;  ///< When it returned. Since 1970, UTC.
  std::uint64_t step;
  std::uint64_t attempt;
  double loss;
  std::uint64_t samples;
  std::int64_t duration_ns, compute_ns, reduce_ns, wait_ns, data_ns;
  StepStatus status;
  std::uint32_t counted;
  std::uint32_t participants;
  std::uint32_t tries;
};

constexpr std::size_t step_statuses = 6;
/// Bounds of the buckets in which durations are counted.
constexpr std::array<std::int64_t, 19> duration_bounds_ns{
    100'000,        200'000,        500'000,        1'000'000,      2'000'000,
    5'000'000,      10'000'000,     20'000'000,     50'000'000,     100'000'000,
    200'000'000,    500'000'000,    1'000'000'000,  2'000'000'000,  5'000'000'000,
    10'000'000'000, 20'000'000'000, 50'000'000'000, 100'000'000'000};

struct Durations {
  std::uint64_t in_bucket[duration_bounds_ns.size() + 1];  ///< The last one is above all bounds.
  std::int64_t sum_ns;
};

/// What the records since the session's beginning add up to.
struct StepTotals {
  std::uint64_t calls[step_statuses];  ///< Of step(), by StepStatus.
  // Only steps that counted are added to these.
  Durations duration, compute, reduce, wait, data;
  double last_loss;  ///< The loss of the last step that counted; 0 before the first.
};

/// Plain data that is read while another process writes it. The reader finds out from other fields whether
/// the words that it has read belong together.
template <class Data>
using SharedWords = std::array<std::atomic<std::uint64_t>, sizeof(Data) / sizeof(std::uint64_t)>;

/// The last calls of step(). Written by the host (engine/session/step_history.hpp). Record i is at i mod the
/// number of places; the last max_step_records records leave one place free, for the record that is being
/// written.
struct StepHistory {
  /// How many records there were. Advanced when a record and the totals that include it are whole: what a
  /// killed host left half written is no part of the history, and the next host overwrites it.
  alignas(64) std::atomic<std::uint64_t> recorded;
  SharedWords<StepRecord> record[max_step_records + 1];
  SharedWords<StepTotals> totals[2];  ///< The valid one is at `recorded` mod 2.
};

/// What a thread of a session does for a while.
enum class Activity : std::uint16_t {
  none,
  // A host.
  step,
  assemble,  ///< Until an attempt can be opened.
  attempt,   ///< From its opening to its result.
  zero_grad,
  write_parameters,
  copy_checkpoint,
  // A runner. Most are phases of the same name.
  init,
  waiting,  ///< For an attempt; of the loader: for a free slot, or another sharding.
  prepare,  ///< From the trigger to the first batch; loads parameters where the replica has copies.
  data,
  forward,
  backward,  ///< With the wait until the device has finished.
  vote,
  other_votes,  ///< Waits for the votes of the other ranks.
  reduce,
  update,  ///< Of parameters, in an inner step.
  // The supervisor, of a rank.
  recover,       ///< From the end of a runner until its replacement is ready.
  start_runner,  ///< The part of `recover`, or of a session's start, from the fork on.
  // The loader.
  read,
  // The checkpoint writer.
  write_checkpoint,
};
const char* to_string(Activity activity) noexcept;

/// What a thread did from one time to another.
struct Span {
  std::int64_t begin_ns;  ///< base::now_ns()
  std::int64_t end_ns;
  std::uint64_t step;     ///< The step that it was for; 0: none.
  std::uint64_t attempt;  ///< 0: none.
  std::int32_t pid;
  std::int16_t rank;  ///< The rank that the supervisor did it for; -1: none.
  Activity activity;
};

/// The last spans of a thread, which alone writes them (engine/session/spans.hpp). A replacement of its
/// process goes on in the same ring. Span i is at i mod the number of places; the last max_spans spans leave
/// one place free, for the span that is being written.
struct SpanRing {
  /// How many spans there were. Advanced when one is whole, so a killed process leaves none half written.
  alignas(64) std::atomic<std::uint64_t> recorded;
  SharedWords<Span> span[max_spans + 1];
};

/// The threads of a session other than runners. Their rings follow the runners' rings.
enum class SpanThread : std::uint32_t { host, supervisor, loader, checkpoint_writer };
constexpr std::uint64_t span_threads = 4;
constexpr std::uint64_t span_rings(int ranks) noexcept {
  return static_cast<std::uint64_t>(ranks) + span_threads;
}

/// Written by the loader. The numbers of elements of all slots follow, then the slots.
struct Queue {
  ipc::Epoch filled;                                 ///< The runner waits on it.
  alignas(64) std::atomic<std::uint64_t> published;  ///< Batches published since the beginning.
  std::atomic<std::uint64_t> end;      ///< No batch from this number on follows; all ones: no end is known.
  std::atomic<std::uint64_t> filling;  ///< Elements in the slot of the next batch so far.
  /// Elements of the source that were left out before a slot, as BatchQueueWriter::leave_out() notes them.
  std::atomic<std::uint64_t> left_out;
  std::atomic<std::uint32_t> failed;  ///< 1: the data ended by an error, whose text is in `error`.
  char error[text_bytes];
};

static_assert(sizeof(Header) <= 4096);
static_assert(alignof(Control) == 64 && alignof(RankRecord) == 64 && sizeof(RankRecord) % 64 == 0);
static_assert(alignof(Sharding) == 8 && alignof(Incident) == 8);
static_assert(sizeof(Tag) == 24 && sizeof(Counters) % 8 == 0 && sizeof(Queue) % 64 == 0);
static_assert(sizeof(StepRecord) % 8 == 0 && sizeof(StepTotals) % 8 == 0 && alignof(StepHistory) == 64);
static_assert(sizeof(Span) % 8 == 0 && alignof(SpanRing) == 64 && sizeof(SpanRing) % 64 == 0);
static_assert(((max_spans + 1) & max_spans) == 0);  // So that a place is found without a division.
static_assert(static_cast<std::size_t>(StepStatus::manager_lost) + 1 == step_statuses);
static_assert(std::atomic<Phase>::is_always_lock_free && std::atomic<RunnerState>::is_always_lock_free);

/// The sizes from which a session is planned.
struct Extent {
  int ranks = 0;
  TensorBytes bytes{};
  std::uint64_t tensors = 0;
  bool has_snapshot = false;
  std::uint64_t buffer_bytes = 0;
  std::uint64_t manifest_bytes = 0;
  std::uint64_t slots = 0;  ///< Slots of each queue; 0: no queues.
  bool keeps_last_step = false;
  std::uint64_t slot_bytes = 0;
  std::uint64_t batch_size = 0;  ///< At least 1 if there are queues.
};

/// Fills in sizes and offsets of a session of that extent. Does not touch `magic`.
void plan_layout(const Extent& extent, Header& header);

/// Plans the layout of a session that another process made from the sizes in `header`, which is in shared
/// memory; `bytes` is the size of the memfd. Throws SessionError unless `header` equals that plan to the last
/// bit (`magic` apart) and the plan has `bytes` bytes.
void plan_stated_layout(const Header& header, std::uint64_t bytes, Header& plan);

/// Bytes that a session with the slabs of `ranks` ranks takes while nothing is unfrozen.
std::uint64_t session_bytes(const Header& header, int ranks);

/// A hash of the layout version and the sizes of the structures.
std::uint64_t build_fingerprint() noexcept;

constexpr std::uint64_t align_up(std::uint64_t n, std::uint64_t alignment) noexcept {
  return (n + alignment - 1) / alignment * alignment;
}

}  // namespace accelmgr::session
