// The byte map of a session: plain data in shared memory, and where each part lies. Behaviour is elsewhere.
//
// clang-format off
//   session memfd (offsets in Header, regions 64-byte aligned, the big ones 2 MiB)
//   +--------+---------+------------+---------+-----------+----------+----------------+------+--------+------------+-----------+
//   | Header | Control | RankRecord | Dealing | Incident  | manifest | state copies   | undo | queues | parameters | gradients |
//   |        |         | [24]       |         | [4]       |          | x2             |      |        |            |           |
//   +--------+---------+------------+---------+-----------+----------+----------------+------+--------+------------+-----------+
//                                                         per copy: Counters, per rank: generator, buffers; result buffers
//   slab memfd, one per rank, allocated when the rank is first wanted
//   +---------------+-----------------------------+
//   | tag[tensors]  | gradients in the slab dtype |
//   +---------------+-----------------------------+
// clang-format on
//
// Parameters, gradients and slabs have the same order of elements: tensors one after the other, each
// beginning at a multiple of 64 bytes of the master's dtype, the gaps zero for ever. Every field names its
// one writer; the manager's main thread, which is the supervisor's, sets all of them once, before others
// live.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ipc/epoch.hpp"
#include "session/step_word.hpp"

namespace accelmgr::session {

constexpr std::uint64_t magic = 0x52474d4c45434341ull;  // "ACCELMGR"
constexpr std::uint32_t layout_version = 3;
constexpr std::size_t region_alignment = 64;
constexpr std::size_t big_region_alignment = std::size_t{2} << 20;
constexpr std::size_t chunk_bytes = 4096;      ///< Of master gradients: the unit of the undo image.
constexpr std::size_t generator_bytes = 5120;  ///< Holds the state of torch's CPU generator (5056 bytes).
constexpr std::size_t text_bytes = 4096;
constexpr std::size_t log_tail_bytes = 2048;
constexpr std::size_t source_state_bytes = 4000;
constexpr std::size_t row_guard_bytes = 64;      ///< Behind each row of a slot: of nobody, or of a later row.
constexpr std::size_t queue_guard_bytes = 4096;  ///< Behind the slots of a queue: of nobody.
constexpr std::uint64_t max_incidents = 4;       ///< The last so many are remembered.
constexpr int max_scalars = 16;
constexpr std::size_t scalar_name_bytes = 48;

enum class Element : std::uint32_t { f32, f64 };
enum class SlabElement : std::uint32_t { same, bf16 };

constexpr std::size_t bytes_of(Element e) noexcept { return e == Element::f32 ? 4 : 8; }

/// Written by the manager before the first fork, constant afterwards.
struct Header {
  std::atomic<std::uint64_t> magic;  ///< Stored last: a reader that finds it finds all the rest.
  std::uint32_t layout_version;
  std::uint32_t ranks;
  std::uint64_t fingerprint;  ///< Of the build; another build is a stranger.
  std::uint64_t total_bytes;
  Element element;
  SlabElement slab_element;
  std::uint64_t elements;  ///< Of parameters, gaps included.
  std::uint64_t tensors;
  std::uint64_t buffer_bytes;  ///< Of one copy of all buffers.
  std::uint64_t slots;         ///< Of each queue.
  std::uint64_t slot_bytes;
  std::uint64_t slab_bytes;        ///< Of each slab memfd.
  std::uint64_t slab_data_offset;  ///< In a slab memfd.
  // Offsets of the regions.
  std::uint64_t control, records, dealing, incidents, manifest, manifest_bytes, copies, copy_bytes, undo,
      queues, queue_bytes, parameters, gradients;
};

/// Why a runner refuses an attempt.
enum class Reason : std::uint32_t {
  none,
  exception,
  model_error,
  nonfinite,
  data_end,
  data_error,
  parameters_changed
};

/// What the host asks of an attempt. Written by the host while the word is closed.
struct Request {
  RankMask participants = 0;
  std::uint32_t accumulate = 0;     ///< 1: master += mean gradient; 0: master = mean gradient.
  std::uint32_t micro_batches = 0;  ///< Of each rank: grad_accumulation_steps.
  std::uint32_t batch_size = 0;
  std::uint32_t by_samples = 0;        ///< 1: `loss_scaling: samples`.
  std::uint32_t mean_buffers = 0;      ///< 1: `buffers.policy: mean`.
  std::uint32_t refuse_nonfinite = 0;  ///< 1: who meets a non-finite loss or gradient refuses the attempt.
  std::uint32_t skip = 0;              ///< 1: the batches are consumed, and nothing else changes.
  std::uint64_t parameter_version = 0;
};

struct Control {
  alignas(64) std::atomic<std::uint64_t> word;  ///< All, by the transitions of step_word.hpp.
  alignas(64) Request request;                  ///< host
  alignas(
      64) std::atomic<std::uint64_t> parameter_version;  ///< host; odd while parameters are being written.
  std::atomic<std::uint64_t> buffer_version;  ///< host: how often it wrote the valid copies of all buffers.
  ipc::Epoch trigger;                         ///< Advanced when an attempt opens. Runners wait.
  ipc::Epoch votes;                           ///< ... when it is committed or aborted. Runners wait.
  ipc::Epoch finish;                          ///< ... when it is closed or aborted. Host and loader wait.
  ipc::Epoch life;                            ///< ... when a runner is ready or lost. Manager waits.
  alignas(64) std::atomic<std::uint32_t> stopping;  ///< host, manager
  alignas(64) std::atomic<RankMask> deal_to;        ///< host: the ranks that the queues are to be dealt to.
  // The supervisor's.
  alignas(64) std::atomic<RankMask> team;  ///< The ranks that are to take part in the next attempt.
  std::atomic<std::uint32_t> given_up;   ///< 1: nothing more is done about lost runners; the incidents tell.
  char given_up_why[256];                ///< Which limit was met.
  std::atomic<std::uint64_t> incidents;  ///< How many there were; the ring holds the last.
  std::atomic<std::uint64_t> replacements;  ///< Runners started in the place of lost ones.
  std::atomic<std::uint32_t> managers;      ///< manager: those that took the session over.
};

enum class Phase : std::uint32_t { none, init, waiting, data, forward, backward, vote, reduce, stopping };
const char* to_string(Phase phase) noexcept;

enum class Life : std::uint32_t { absent, starting, ready, retiring, lost };

struct Scalar {
  char name[scalar_name_bytes];
  double sum;
};

/// What a runner says of its attempt before its vote.
struct Ballot {
  double loss;  ///< Weighed sum over its micro-batches (see session/mean.hpp).
  std::uint64_t samples;
  std::uint64_t elements;  ///< Taken from the queue: `samples`, or what is skipped.
  std::uint32_t micro_batches;
  std::uint32_t nonfinite;
  std::uint64_t parameter_version;
  std::uint64_t compute_ns;  ///< Forward, backward, take-over.
  std::uint64_t data_ns;     ///< Waiting for batches.
  std::uint32_t scalars;
  Scalar scalar[max_scalars];
};

/// A process's last log lines: byte i of all that was ever written stands at i mod sizeof(text).
struct LogTail {
  std::atomic<std::uint64_t> written;
  char text[log_tail_bytes - 8];
};

struct RankRecord {
  // The runner's. Before there is one, the supervisor sets `phase` and `log` back: what it finds there after
  // the end of a runner is that one's own.
  alignas(64) std::atomic<std::uint64_t> cursor;  ///< Of the reduction. After the runner's death: of who
                                                  ///< finishes its slice.
  alignas(64) std::atomic<Phase> phase;
  std::atomic<std::uint64_t> heartbeat;  ///< Counts phases, and slices of waiting.
  std::atomic<std::uint64_t> attempt;    ///< The last it began.
  std::atomic<std::uint64_t>
      settled;  ///< The last whose end it has seen; its working state is that of the valid copies.
  std::atomic<std::uint64_t> reduce_ns;  ///< Of its last reduction.
  std::atomic<std::uint64_t> start_ns;   ///< From its fork until it was ready.
  std::atomic<std::uint64_t> model_ns;   ///< Of that, building the model.
  alignas(64) Ballot ballot;
  alignas(64) std::atomic<Reason> reason;  ///< Why it aborted `reason_attempt`.
  std::atomic<std::uint64_t> reason_attempt;
  char error[text_bytes];
  alignas(64) LogTail log;
  // The supervisor's.
  alignas(64) std::atomic<Life> life;
  std::atomic<std::int32_t> pid;
  std::atomic<std::uint32_t> generation;
  std::atomic<std::int32_t> exit_status;  ///< As waitpid gives it; valid when `life` is lost.
};

/// The committed state that is no tensor. Two copies; the step word's index names the valid one.
struct Counters {
  std::uint64_t steps;
  std::uint64_t samples;
  std::uint64_t skips;     ///< Attempts whose batches were consumed without a step.
  std::uint64_t elements;  ///< Data cursor: elements of the source that were consumed, always its first ones.
  std::uint64_t participants;  ///< A RankMask: of the last committed attempt.
  std::uint64_t rank_samples[max_ranks];
  std::uint64_t batches[max_ranks];  ///< Batches of each queue that were consumed.
};

/// Where the source stood before it gave `element`, so that another can go on there. 0 and no bytes: at its
/// beginning.
struct SourceState {
  std::uint64_t element;
  std::uint64_t bytes;
  char state[source_state_bytes];
};

/// How the elements that nobody has consumed are dealt: element `first_element` + i goes to rank number i mod
/// n of the n ranks of `dealt_to`, whose first batch of this dealing has the number first_batch[rank].
/// Written by the loader; anew only when the host asks for it, which then waits and opens no attempt.
struct Dealing {
  std::atomic<RankMask> dealt_to;  ///< 0 while they are dealt anew.
  std::atomic<std::uint32_t>
      source_index;  ///< Which of `source` is valid: a state at or before the data cursor.
  std::uint64_t first_element;
  std::uint64_t first_batch[max_ranks];
  SourceState source[2];
};

/// How a process was lost: what its record said then, and what the supervisor adds. Number i stands at
/// (i - 1) mod max_incidents. Written by the supervisor before Control::incidents counts it.
struct Incident {
  std::int64_t time_ns;  ///< Since 1970, UTC.
  std::int32_t rank;     ///< -1: the launcher.
  std::int32_t pid;
  std::uint32_t generation;
  std::int32_t exit_status;  ///< As waitpid gives it.
  Phase phase;
  Reason reason;
  std::uint64_t step;
  std::uint64_t attempt;
  char what[text_bytes];  ///< Its exception, or why it was ended.
  char log[log_tail_bytes];
};

struct Queue {
  ipc::Epoch filled;                                 ///< The runner waits.
  alignas(64) std::atomic<std::uint64_t> published;  ///< loader: batches since the beginning.
  std::atomic<std::uint64_t> end;      ///< loader: no batch from this number on; all ones: no end known.
  std::atomic<std::uint64_t> filling;  ///< loader: elements in the slot of the next batch.
  std::atomic<std::uint32_t> failed;   ///< loader: 1 when the end is an error, whose text is below.
  char error[text_bytes];
};

static_assert(sizeof(Header) <= 4096);
static_assert(alignof(Control) == 64 && alignof(RankRecord) == 64 && sizeof(RankRecord) % 64 == 0);
static_assert(alignof(Dealing) == 8 && alignof(Incident) == 8);
static_assert(sizeof(Counters) % 8 == 0 && sizeof(Queue) % 64 == 0);
static_assert(std::atomic<Phase>::is_always_lock_free && std::atomic<Life>::is_always_lock_free);

/// What a session is to hold.
struct Extent {
  int ranks = 0;
  Element element = Element::f32;
  SlabElement slab_element = SlabElement::same;
  std::uint64_t elements = 0;
  std::uint64_t tensors = 0;
  std::uint64_t buffer_bytes = 0;
  std::uint64_t manifest_bytes = 0;
  std::uint64_t slots = 0;
  std::uint64_t slot_bytes = 0;
};

/// Sizes and offsets of a session of that extent; `magic` is left 0.
void plan_layout(const Extent& extent, Header& header);

/// Bytes of a session of which `ranks` ranks are wanted.
std::uint64_t session_bytes(const Header& header, int ranks);

/// Of this build: version of the layout and sizes of its structures.
std::uint64_t build_fingerprint() noexcept;

constexpr std::uint64_t align_up(std::uint64_t n, std::uint64_t alignment) noexcept {
  return (n + alignment - 1) / alignment * alignment;
}

}  // namespace accelmgr::session
