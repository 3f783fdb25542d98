// Collectives of tensors as plain memory: dense, in CPU memory, row-major. The callers
// (libtorch_distributed, python) convert their tensors to this form and allocate the memory of the results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "launcher/distributed/context/group.hpp"

namespace accelmgr::distributed {

/// The operation with this name: SUM, AVG, PRODUCT, MIN, MAX, AND, OR. Throws UsageError, which lists these.
ReduceOp reduce_op(const std::string& name);

/// The dtype with this torch name. Throws UsageError for dtypes that collectives do not support (quantized,
/// bits, floats of 8 bits or less, complex halves).
DType collective_dtype(std::string_view name);

struct Array {
  const void* data;  ///< May be null if there are no elements.
  DType dtype;
  std::span<const std::int64_t> shape;

  std::size_t count() const noexcept;
};

/// The shape, which the members compare. A 0-d tensor gets an empty span with a pointer, because a null span
/// means that the shape is unknown.
inline CallOptions options_for(const Array& array) {
  static constexpr std::int64_t of_0_d = 0;
  return {.shape = array.shape.empty() ? std::span(&of_0_d, 0) : array.shape};
}

/// The size of one of `blocks` blocks of dimension 0. If dimension 0 is not a multiple of `blocks`, the
/// collective is still made, with 0 elements, so that no member waits: either the members find that their
/// shapes differ, or check() throws on all of them.
class Blocks {
 public:
  Blocks(const Array& array, int blocks)
      : even_(!array.shape.empty() && array.shape[0] % blocks == 0),
        count_(even_ ? array.count() / static_cast<std::size_t>(blocks) : 0),
        blocks_(blocks) {}
  std::size_t count() const noexcept { return count_; }
  /// Throws UsageError.
  void check(const Array& array, const char* call) const;

 private:
  bool even_;
  std::size_t count_;
  int blocks_;
};

// The result is written to `out`, which is the input's memory or does not overlap it. members.communicate()
// must be true. All of these block, and throw as Communicator does.

/// `out` has as many elements as `in`.
void all_reduce(const Members& members, const Array& in, void* out, ReduceOp op);
/// `out` has in.count() elements for each member.
void all_gather(const Members& members, const Array& in, void* out);
/// `data` is dense memory with the shape and dtype of `like`. Rank `src` sends it, the others overwrite it.
/// Throws UsageError for a rank that does not exist.
void broadcast(const Members& members, const Array& like, void* data, int src);
/// Dimension 0 of `in` is split into one block for each member; `out` has the size of one block. Throws
/// UsageError, on all members, if dimension 0 is not a multiple of their number.
void reduce_scatter(const Members& members, const Array& in, void* out, ReduceOp op);
/// `out` has as many elements as `in`. Splits and throws as reduce_scatter().
void all_to_all(const Members& members, const Array& in, void* out);

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
