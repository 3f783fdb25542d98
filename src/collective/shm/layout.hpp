// The byte map of a world: the shared memory of the ranks of one host. Plain data; behaviour is elsewhere.
//
// clang-format off
//   world memfd, N ranks (offsets in Header; controls and data begin at pages)
//   +--------+---------+-----------+---------------------------+------------------------+
//   | Header | Rank[N] | Slot[128] | control of slot 0 ... 127 | data of slot 0 ... 127 |
//   +--------+---------+-----------+---------------------------+------------------------+
//   control of a slot: who has arrived              data of a slot: what is on its way
//   +---------+-----------+-----------------------+ +---------------------------+---------------+
//   | Control | Member[N] | missing[N][N/64 bits] | | half[N][2]                | Mailbox[N][N] |
//   +---------+-----------+-----------------------+ +---------------------------+---------------+
// clang-format on
//
// A slot serves one group at a time; the world itself is the first. Of a group of n ranks, member i is the
// one with the i-th lowest rank; the first n entries of each array are used. The file is sparse: what is used
// is given its memory first (so that too little of it is an error, and no SIGBUS), and all of a slot's memory
// is returned when its group has ended. Zeros are the initial state of all of a slot.
//
// Every field names its one writer. "Lock": whoever holds Header::lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "collective/shm/parking.hpp"
#include "collective/signature.hpp"

namespace accelmgr::collective::shm {

constexpr std::uint64_t magic = 0x44524c574d434341ull;  // "ACCMWLRD"
constexpr std::uint32_t layout_version = 2;
constexpr int most_ranks = 1024;
constexpr std::size_t slots = 128;  ///< Groups at the same time, the world included.
/// Of a half, where ranks spin: two stay in the second-level cache.
constexpr std::size_t spinning_half_bytes = std::size_t{256} << 10;
/// Where every wait goes through the kernel, fewer of them are worth more; of large worlds it is the other.
constexpr std::size_t parking_half_bytes = std::size_t{1} << 20;
constexpr int parking_half_ranks = 64;
constexpr std::size_t page_bytes = 4096;

struct Header {
  // Of who makes the world; constant afterwards.
  std::atomic<std::uint64_t> magic;  ///< Stored last.
  std::uint32_t layout_version;
  std::uint32_t ranks;
  std::uint64_t fingerprint;  ///< Of the build; another build is a stranger.
  std::uint64_t total_bytes;
  std::uint64_t rank_lines, slots, controls, control_bytes, data,
      data_bytes;           ///< Offsets, and bytes of each.
  std::uint64_t mailboxes;  ///< In the data of a slot.
  std::uint64_t half_bytes;
  std::uint32_t parks;                          ///< 1: nobody spins, whatever cores there are.
  alignas(64) std::atomic<std::uint64_t> lock;  ///< All, by compare-and-swap. The holder's identity; 0: free.
  std::uint64_t groups;  ///< Lock: how many there have been, which is the id of the last.
};

enum class Presence : std::uint32_t { absent, joined, left };

struct alignas(64) Rank {
  std::atomic<std::uint64_t> identity;   ///< Lock. The process that joined last; 0: none has.
  std::uint64_t joins;                   ///< Lock. How often it was joined.
  std::uint32_t joined;                  ///< Lock. 1 until that has left.
  std::atomic<std::uint64_t> cores[16];  ///< Lock. Which it may run on; all zeros: not known.
};

/// Which group a slot serves. Lock.
struct alignas(64) Slot {
  std::uint32_t used;
  std::uint32_t dirty;    ///< 1: its memory is not all zeros.
  std::uint64_t id;       ///< Of the group.
  std::uint64_t parent;   ///< Id of the group it was made from; 0: it is the world.
  std::uint64_t ordinal;  ///< Which one of these members from this parent; of the world: how many joins.
  std::uint64_t members[most_ranks / 64];
};

struct Control {
  alignas(64) std::atomic<std::uint64_t> verdict;  ///< All, once, by compare-and-swap: see Verdict.
  Parking arrivals;                                ///< Who waits for a round to be complete.
};

/// What a member shows of itself in a round; complete in the first line unless there are more than four
/// dimensions or objects.
struct alignas(64) Post {
  std::atomic<std::uint64_t> round;  ///< Stored last: it has arrived.
  Signature signature;               ///< Of the call; only its own dimensions. In a call's first round.
  std::uint64_t length;              ///< Of its object. In a call's first round.
};

struct alignas(64) Member {
  // That member's.
  std::atomic<Presence> presence;
  std::uint64_t identity;  ///< Of its process, before `presence`.
  Post post[2];            ///< Of odd and even rounds: who has arrived at one may still be read in the other.
};

/// Bytes on their way from one member to another: byte i of all stands at i mod ring_bytes.
struct Mailbox {
  static constexpr std::size_t ring_bytes = 16 * 1024 - 384;
  alignas(64) std::atomic<std::uint64_t> written;  ///< The sender.
  alignas(64) std::atomic<std::uint64_t> read;     ///< The receiver.
  Parking filled;                                  ///< The receiver waits.
  Parking drained;                                 ///< The sender waits.
  std::byte ring[ring_bytes];
};

static_assert(sizeof(Header) <= 256 && sizeof(Rank) == 192 && sizeof(Slot) % 64 == 0);
static_assert(offsetof(Post, signature) + offsetof(Signature, shape) + 4 * sizeof(std::int64_t) == 64);
static_assert(sizeof(Post) == 192 && sizeof(Member) == 64 + 2 * 192);
static_assert(sizeof(Mailbox) == 16 * 1024 && spinning_half_bytes % page_bytes == 0 &&
              parking_half_bytes % page_bytes == 0);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<Presence>::is_always_lock_free);

constexpr std::size_t words_of_mask(std::uint32_t ranks) noexcept { return (ranks + 63) / 64; }

/// Sizes and offsets for `ranks` ranks; `magic` is left 0.
void plan_layout(std::uint32_t ranks, bool parks, Header& header) noexcept;

/// Of this build: version of the layout and sizes of its structures.
std::uint64_t build_fingerprint() noexcept;

}  // namespace accelmgr::collective::shm
