// The byte map of a world: the shared memory of the ranks of one node. Plain data; behaviour is elsewhere.
//
// clang-format off
//   world memfd, N ranks (offsets in Header; controls and data begin at pages)
//   +--------+---------+-----------+---------------------------+------------------------+
//   | Header | Rank[N] | Slot[128] | control of slot 0 ... 127 | data of slot 0 ... 127 |
//   +--------+---------+-----------+---------------------------+------------------------+
//   control of a slot: which members have arrived   data of a slot: what the members exchange
//   +---------+-----------+                         +------------+
//   | Control | Member[N] |                         | half[N][2] |
//   +---------+-----------+                         +------------+
// clang-format on
//
// A slot serves one group at a time; the world itself is the first group. Member i of a group of n ranks is
// the one with the i-th lowest rank; the first n entries of each array are used. The file is sparse. A range
// gets its memory before it is used, so that too little memory is an error and no SIGBUS. All of a slot's
// memory is returned when its group has ended. The initial state of a slot is all zeros.
//
// Every field names its one writer. "Lock" stands for the holder of Header::lock.
#pragma once

#include <atomic>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/ipc/pages.hpp"
#include "launcher/collective/shm/parking.hpp"
#include "launcher/collective/signature/signature.hpp"

namespace accelmgr::collective::shm {

constexpr std::uint64_t magic = 0x44524c574d434341ull;  // "ACCMWLRD"
constexpr std::uint32_t layout_version = 4;
constexpr int most_ranks = 1024;
constexpr std::size_t slots = 128;  ///< Groups at the same time, the world included.
/// Bytes of a half where ranks spin: two halves stay in the second-level cache.
constexpr std::size_t spinning_half_bytes = std::size_t{256} << 10;
/// Bytes of a half where every wait goes through the kernel, so that fewer rounds matter more. Worlds of more
/// than parking_half_ranks ranks have halves of spinning_half_bytes.
constexpr std::size_t parking_half_bytes = std::size_t{1} << 20;
constexpr int parking_half_ranks = 64;

struct Header {
  // Written by the creator of the world; constant afterwards.
  std::atomic<std::uint64_t> magic;  ///< Stored last.
  std::uint32_t layout_version;
  std::uint32_t ranks;
  std::uint64_t fingerprint;  ///< Identifies the build. Other builds refuse this world.
  std::uint64_t total_bytes;
  std::uint64_t rank_lines, slots, controls, control_bytes, data,
      data_bytes;  ///< Offsets, and bytes of each.
  std::uint64_t half_bytes;
  std::uint32_t parks;                          ///< 1: no rank ever spins.
  alignas(64) std::atomic<std::uint64_t> lock;  ///< All, by compare-and-swap. Holder's identity; 0: free.
  std::uint64_t groups;  ///< Lock. How many groups there have been: the id of the last one.
};

enum class Presence : std::uint32_t { absent, joined, left };

struct alignas(64) Rank {
  std::atomic<std::uint64_t> identity;   ///< Lock. The process that joined last as this rank; 0: none yet.
  std::uint64_t joins;                   ///< Lock. How many processes have joined as this rank.
  std::uint32_t joined;                  ///< Lock. 1 until that process has left.
  std::atomic<std::uint64_t> cores[16];  ///< Lock. Cores on which it may run; all zeros: unknown.
};

/// Which group a slot serves. Lock.
struct alignas(64) Slot {
  std::uint32_t used;
  std::uint32_t dirty;    ///< 1: its memory is not all zeros.
  std::uint64_t id;       ///< The group's id.
  std::uint64_t parent;   ///< Id of the group it was made from; 0: this is the world.
  std::uint64_t ordinal;  ///< Counts groups with these members and this parent; for the world: counts joins.
  std::bitset<most_ranks> members;
};

struct Control {
  alignas(64) std::atomic<std::uint64_t> verdict;  ///< All, once, by compare-and-swap. See Group::Verdict.
  Parking arrivals;                                ///< Members that wait for a round to be complete.
};

/// What a member posts in a round. Fits in the first cache line unless the tensor has more than four
/// dimensions or the call is about objects.
struct alignas(64) Post {
  std::atomic<std::uint64_t> round;  ///< Stored last; the member has arrived then.
  Signature signature;   ///< Set in a call's first round. Entries beyond `dimensions` are not written.
  std::uint64_t length;  ///< Of its object. Set in a call's first round.
};

struct alignas(64) Member {
  // Written by that member.
  std::atomic<Presence> presence;
  std::uint64_t identity;  ///< Of its process. Stored before `presence`.
  Post post[2];  ///< Of even and odd rounds: others may still read one while this member writes the other.
  std::bitset<most_ranks> missing;  ///< The members that are missing according to a verdict of this one.
};

static_assert(sizeof(Header) <= 256 && sizeof(Rank) == 192 && sizeof(Slot) % 64 == 0);
static_assert(offsetof(Post, signature) + offsetof(Signature, shape) + 4 * sizeof(std::int64_t) == 64);
static_assert(sizeof(Post) == 192 && sizeof(Member) == 64 + 2 * 192 + most_ranks / 8);
static_assert(spinning_half_bytes % ipc::largest_page_bytes == 0 &&
              parking_half_bytes % ipc::largest_page_bytes == 0);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<Presence>::is_always_lock_free);

/// Fills in sizes and offsets for `ranks` ranks; leaves `magic` 0.
void plan_layout(std::uint32_t ranks, bool parks, Header& header) noexcept;

/// A hash of what two programs must share to use the same memory: layout version and sizes.
std::uint64_t build_fingerprint() noexcept;

}  // namespace accelmgr::collective::shm
