// Collectives of tensors as plain memory: dense, row-major, in CPU memory or on a device. The callers
// (libtorch_distributed, python) convert their tensors to this form and allocate the memory of the results.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "launcher/distributed/arrays/device_group.hpp"
#include "launcher/distributed/context/group.hpp"

namespace accelmgr::distributed {

// The result is written to `out`, which is the input's memory or does not overlap it. members.communicate()
// must be true. All of these block, and throw as Communicator does. `place`: where the memory is; null: it is
// CPU memory. They return false as those of DeviceGroup do, and only for memory of a device.

/// `out` has as many elements as `in`.
bool all_reduce(const Members& members, const Array& in, void* out, ReduceOp op,
                const OnDevice* place = nullptr);
/// `out` has in.count() elements for each member.
bool all_gather(const Members& members, const Array& in, void* out, const OnDevice* place = nullptr);
/// `data` is dense memory with the shape and dtype of `like`. Rank `src` sends it, the others overwrite it.
/// Throws UsageError for a rank that does not exist.
bool broadcast(const Members& members, const Array& like, void* data, int src,
               const OnDevice* place = nullptr);
/// Dimension 0 of `in` is split into one block for each member; `out` has the size of one block. Throws
/// UsageError, on all members, if dimension 0 is not a multiple of their number.
bool reduce_scatter(const Members& members, const Array& in, void* out, ReduceOp op,
                    const OnDevice* place = nullptr);
/// `out` has as many elements as `in`. Splits and throws as reduce_scatter().
bool all_to_all(const Members& members, const Array& in, void* out, const OnDevice* place = nullptr);

/// What the source of a broadcast in safe mode passes: nothing, a tensor, a number, a text, or an object that
/// cannot be sent.
struct Unsendable {
  std::string why;
};
using Sent = std::variant<std::monostate, Array, double, std::string, Unsendable>;
/// Called on the other ranks: allocates memory for the tensor that is about to be received.
using MakeArray = std::function<void*(DType, const std::vector<std::int64_t>& shape)>;
/// What was received: a tensor (in the memory of MakeArray), a number or a text.
struct ArrayCame {};
using Came = std::variant<ArrayCame, double, std::string>;

/// Broadcast in safe mode: the other ranks need not know the kind, dtype and shape. `mine` is read only on
/// rank `src`. members.communicate() must be true. Blocks. Throws UsageError, on all members, if the source
/// passed nothing or an Unsendable.
Came broadcast_safely(const Members& members, const Sent& mine, const MakeArray& make, int src);

/// Throws CollectiveError{mismatch}, which says what rank `src` sent and what was expected.
[[noreturn]] void refuse_kind(const Came& came, int src, const char* expected);

/// All ranks, for a broadcast from `src`. Throws UsageError if there is no such rank.
Members everyone(int src);

}  // namespace accelmgr::distributed
