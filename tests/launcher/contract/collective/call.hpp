// A collective call whose inputs follow from its description: every rank can compute the inputs of all ranks,
// and from them the output that it must get.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "launcher/collective/signature/signature.hpp"
#include "oracle.hpp"

namespace accelmgr::collective::contract {

struct Call {
  CallKind kind = CallKind::barrier;  ///< A collective of elements, or barrier.
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  std::size_t count = 0;
  int root = 0;
  bool in_place = false;
  bool misaligned = false;               ///< Buffers at odd addresses.
  std::vector<std::int64_t> shape = {};  ///< Empty: none is given.
  std::uint64_t seed = 0;
};

/// "all_reduce SUM float32 [5], in place, misaligned"
std::string describe(const Call& call);

/// Makes the call. Returns what is wrong with the result, with the input (which must stay), or with the
/// memory beside the output; empty if nothing is. A floating point reduction that need not be `in_rank_order`
/// may differ in its last bits.
std::string perform(const Call& call, Communicator& communicator, bool in_rank_order = true);

inline constexpr DType all_dtypes[] = {
    DType::uint8,   DType::int8,    DType::uint16,    DType::int16,      DType::uint32,
    DType::int32,   DType::uint64,  DType::int64,     DType::float16,    DType::bfloat16,
    DType::float32, DType::float64, DType::complex64, DType::complex128, DType::boolean,
};
inline constexpr ReduceOp all_ops[] = {ReduceOp::sum, ReduceOp::avg,     ReduceOp::product, ReduceOp::min,
                                       ReduceOp::max, ReduceOp::bit_and, ReduceOp::bit_or};

/// Whether check_reduction() must accept it.
bool makes_sense(DType dtype, ReduceOp op);

}  // namespace accelmgr::collective::contract
