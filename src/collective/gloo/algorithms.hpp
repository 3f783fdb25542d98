// The data of the collectives over a mesh. Ranks send to each other directly, and a reduction combines what
// came in the order of ranks: all get the same bits, those of the other backends.
//
// All throw ExchangeError. Buffers beyond `most_bytes_at_once` go in parts: scratch memory has that bound.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/clock.hpp"
#include "collective/gloo/mesh.hpp"

namespace accelmgr::collective::gloo {

inline constexpr std::size_t most_bytes_at_once = std::size_t{8} << 20;

/// `in` may be `out`. `divisor`: as of Kernels::reduce().
void all_reduce(Mesh& mesh, const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                std::size_t divisor, base::Deadline deadline);

/// Rank r gets the reduction of the `counts[r]` elements that lie in `in` behind those of the ranks before
/// it.
void reduce_scatter(Mesh& mesh, const void* in, void* out, std::span<const std::size_t> counts, DType dtype,
                    ReduceOp op, std::size_t divisor, base::Deadline deadline);

/// Block r of `out`, of `bytes[r]`, becomes that of rank r; this rank's own is there already.
void all_gather(Mesh& mesh, void* out, std::span<const std::size_t> bytes, base::Deadline deadline);

void broadcast(Mesh& mesh, void* data, std::size_t bytes, int root, base::Deadline deadline);

/// The two do not overlap. `in` has a block of `sent[r]` bytes for each rank r, `out` gets one of
/// `received[r]` from it.
void all_to_all(Mesh& mesh, const void* in, std::span<const std::size_t> sent, void* out,
                std::span<const std::size_t> received, base::Deadline deadline);

/// Of any lengths.
std::vector<std::string> all_gather_objects(Mesh& mesh, std::string_view object, base::Deadline deadline);
std::string broadcast_object(Mesh& mesh, std::string_view object, int root, base::Deadline deadline);

}  // namespace accelmgr::collective::gloo
