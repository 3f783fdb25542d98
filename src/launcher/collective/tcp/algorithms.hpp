// The collectives over a mesh. Ranks send to each other directly. A reduction combines the inputs in the
// order of ranks, so all ranks get the same bits, which are those of the other backends.
//
// All calls block and throw ExchangeError. Callers cut longer buffers into parts of `most_bytes_at_once`,
// which bounds the scratch memory.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/clock.hpp"
#include "launcher/collective/tcp/mesh.hpp"

namespace accelmgr::collective::tcp {

inline constexpr std::size_t most_bytes_at_once = std::size_t{8} << 20;

/// `in` may be `out`. `divisor`: see Kernels::reduce().
void all_reduce(Mesh& mesh, const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                std::size_t divisor, base::Deadline deadline);

/// `out` has a block of `bytes[r]` bytes for each rank r. This rank's block must be there; the call fills in
/// the others.
void all_gather(Mesh& mesh, void* out, const std::vector<std::size_t>& bytes, base::Deadline deadline);

void broadcast(Mesh& mesh, void* data, std::size_t bytes, int root, base::Deadline deadline);

/// `in` has a block of `bytes[r]` bytes for each rank r; `out` gets one of as many bytes from it. `in` and
/// `out` must not overlap.
void all_to_all(Mesh& mesh, const void* in, void* out, const std::vector<std::size_t>& bytes,
                base::Deadline deadline);

/// Objects may have any length, which may differ from rank to rank. Returns them one after another.
std::string all_gather_objects(Mesh& mesh, std::string_view object, base::Deadline deadline);
std::string broadcast_object(Mesh& mesh, std::string_view object, int root, base::Deadline deadline);

}  // namespace accelmgr::collective::tcp
