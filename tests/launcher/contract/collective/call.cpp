#include "call.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "backends.hpp"

namespace accelmgr::collective::contract {
namespace {

/// Inputs repeat after this number of elements, and so do outputs: that keeps large calls quick. It is a
/// prime, so that data in the wrong place by a chunk of any usual size differs.
constexpr std::size_t period = sanitized ? 509 : 4093;

constexpr std::size_t guard_bytes = 64;
constexpr std::byte guard{0xa5};

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// The bits of a random element: any integer or truth value. A floating point number has any mantissa, and an
/// absolute value from 0.5 to 2: results depend on the order of the operands, and do not overflow.
std::uint64_t random_bits(DType dtype, std::uint64_t random) {
  const auto floating = [random](int width, int mantissa_bits, std::uint64_t bias) {
    const auto sign = (random >> 63) << (width - 1);
    const auto exponent = (bias - (random >> 62 & 1)) << mantissa_bits;
    return sign | exponent | (random & ((std::uint64_t{1} << mantissa_bits) - 1));
  };
  switch (dtype) {
    case DType::boolean:
      return random & 1;
    case DType::float16:
      return floating(16, 10, 15);
    case DType::bfloat16:
      return floating(16, 7, 127);
    case DType::float32:
    case DType::complex64:
      return floating(32, 23, 127);
    case DType::float64:
    case DType::complex128:
      return floating(64, 52, 1023);
    default:
      return random;
  }
}

bool is_complex(DType dtype) { return dtype == DType::complex64 || dtype == DType::complex128; }

bool is_reduction(CallKind kind) { return kind == CallKind::all_reduce || kind == CallKind::reduce_scatter; }

std::size_t input_blocks(CallKind kind, int size) {
  return kind == CallKind::reduce_scatter || kind == CallKind::all_to_all ? static_cast<std::size_t>(size)
                                                                          : 1;
}

Bytes random_elements(DType dtype, std::size_t count, std::uint64_t seed) {
  const auto part_bytes = size_of(dtype) / (is_complex(dtype) ? 2 : 1);
  Bytes bytes(count * size_of(dtype));
  for (std::size_t at = 0; at < bytes.size() / part_bytes; ++at) {
    const auto bits = random_bits(dtype, mix(seed + at));
    std::memcpy(bytes.data() + at * part_bytes, &bits, part_bytes);
  }
  return bytes;
}

/// The blocks of a rank's input, each cut to one period.
std::vector<Bytes> blocks_of_input(const Call& call, int rank, int size) {
  std::vector<Bytes> blocks(input_blocks(call.kind, size));
  for (auto& block : blocks) {
    const auto number = static_cast<std::uint64_t>(&block - blocks.data());
    const auto seed = mix(call.seed ^ mix(static_cast<std::uint64_t>(rank) << 32 | number));
    block = random_elements(call.dtype, std::min(call.count, period), seed);
  }
  return blocks;
}

std::vector<Bytes> blocks_of_output(const Call& call, int rank, int size) {
  std::vector<std::vector<Bytes>> inputs;
  for (int other = 0; other < size; ++other) inputs.push_back(blocks_of_input(call, other, size));
  // Block `number` of each rank, in the order of ranks.
  const auto column = [&inputs](int number) {
    std::vector<Bytes> blocks;
    for (const auto& input : inputs) blocks.push_back(input[static_cast<std::size_t>(number)]);
    return blocks;
  };
  switch (call.kind) {
    case CallKind::all_reduce:
      return {reduce(column(0), call.dtype, call.op)};
    case CallKind::reduce_scatter:
      return {reduce(column(rank), call.dtype, call.op)};
    case CallKind::all_gather:
      return column(0);
    case CallKind::all_to_all:
      return column(rank);
    default:
      return {inputs[static_cast<std::size_t>(call.root)][0]};
  }
}

/// Repeats each block up to `bytes` bytes, and joins them.
Bytes repeat(const std::vector<Bytes>& blocks, std::size_t bytes) {
  Bytes whole;
  whole.reserve(blocks.size() * bytes);
  for (const auto& block : blocks)
    for (std::size_t at = 0; at < bytes; at += block.size())
      whole.insert(whole.end(), block.begin(),
                   block.begin() + static_cast<std::ptrdiff_t>(std::min(block.size(), bytes - at)));
  return whole;
}

/// Memory of a buffer, with guards around it.
class Buffer {
 public:
  Buffer(std::size_t bytes, std::size_t misaligned_by)
      : memory_(bytes + 2 * guard_bytes + misaligned_by, guard),
        begin_(guard_bytes + misaligned_by),
        bytes_(bytes) {}

  /// Null if the buffer has no bytes: the call must not touch it.
  std::byte* data() { return bytes_ == 0 ? nullptr : memory_.data() + begin_; }
  std::span<const std::byte> first(std::size_t bytes) const {
    return std::span(memory_).subspan(begin_, bytes);
  }
  void fill(const Bytes& bytes) {
    std::copy(bytes.begin(), bytes.end(), memory_.begin() + static_cast<std::ptrdiff_t>(begin_));
  }
  bool is_intact_beyond(std::size_t bytes) const {
    const auto is_guard = [](std::byte byte) { return byte == guard; };
    const auto begin = memory_.begin() + static_cast<std::ptrdiff_t>(begin_);
    return std::all_of(memory_.begin(), begin, is_guard) &&
           std::all_of(begin + static_cast<std::ptrdiff_t>(bytes), memory_.end(), is_guard);
  }

 private:
  Bytes memory_;
  std::size_t begin_;
  std::size_t bytes_;
};

void invoke(const Call& call, Communicator& communicator, const void* in, void* out) {
  CallOptions options;
  if (!call.shape.empty()) options.shape = call.shape;
  switch (call.kind) {
    case CallKind::all_reduce:
      return communicator.all_reduce(in, out, call.count, call.dtype, call.op, options);
    case CallKind::reduce_scatter:
      return communicator.reduce_scatter(in, out, call.count, call.dtype, call.op, options);
    case CallKind::all_gather:
      return communicator.all_gather(in, out, call.count, call.dtype, options);
    case CallKind::broadcast:
      return communicator.broadcast(out, call.count, call.dtype, call.root, options);
    case CallKind::all_to_all:
      return communicator.all_to_all(in, out, call.count, call.dtype, options);
    default:
      return communicator.barrier();
  }
}

/// For a reduction in another order than that of ranks.
double tolerance_of(DType dtype) {
  switch (dtype) {
    case DType::bfloat16:
      return 1e-2;
    case DType::float16:
      return 1e-3;
    case DType::float32:
    case DType::complex64:
      return 1e-6;
    default:
      return 1e-13;
  }
}

std::string outcome(const Call& call, Communicator& communicator, bool in_rank_order) {
  const int rank = communicator.rank();
  const int size = communicator.size();
  const auto block_bytes = call.count * size_of(call.dtype);
  const auto input = repeat(blocks_of_input(call, rank, size), block_bytes);
  const auto expected = repeat(blocks_of_output(call, rank, size), block_bytes);
  const auto larger = std::max(input.size(), expected.size());
  const bool one_buffer = call.in_place || call.kind == CallKind::broadcast;

  Buffer in(one_buffer ? 0 : input.size(), call.misaligned ? 1 : 0);
  Buffer out(one_buffer ? larger : expected.size(), call.misaligned ? 3 : 0);
  (one_buffer ? out : in).fill(input);
  invoke(call, communicator, one_buffer ? out.data() : in.data(), out.data());

  if (auto wrong = difference(expected, out.first(expected.size()), call.dtype,
                              is_reduction(call.kind) && !in_rank_order ? tolerance_of(call.dtype) : 0);
      !wrong.empty())
    return wrong;
  if (!out.is_intact_beyond(one_buffer ? larger : expected.size())) return "wrote beside the output";
  // In place, the blocks of the input that the output does not cover must stay.
  if (one_buffer && input.size() > expected.size() &&
      !std::equal(input.begin() + static_cast<std::ptrdiff_t>(expected.size()), input.end(),
                  out.first(input.size()).begin() + static_cast<std::ptrdiff_t>(expected.size())))
    return "wrote to the input";
  if (!one_buffer &&
      (!in.is_intact_beyond(input.size()) || !difference(input, in.first(input.size()), call.dtype).empty()))
    return "wrote to the input";
  return {};
}

}  // namespace

bool makes_sense(DType dtype, ReduceOp op) {
  const bool is_floating = dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 ||
                           dtype == DType::float64;
  switch (op) {
    case ReduceOp::avg:
      return is_floating || is_complex(dtype);
    case ReduceOp::min:
    case ReduceOp::max:
      return !is_complex(dtype);
    case ReduceOp::bit_and:
    case ReduceOp::bit_or:
      return !is_floating && !is_complex(dtype);
    default:
      return true;
  }
}

std::string describe(const Call& call) {
  CallOptions options;
  if (!call.shape.empty()) options.shape = call.shape;
  auto text =
      collective::describe(make_signature(call.kind, call.count, call.dtype, call.op, call.root, 0, options));
  if (call.in_place) text += ", in place";
  if (call.misaligned) text += ", misaligned";
  return text;
}

std::string perform(const Call& call, Communicator& communicator, bool in_rank_order) {
  if (call.kind == CallKind::barrier) {
    communicator.barrier();
    return {};
  }
  const auto wrong = outcome(call, communicator, in_rank_order);
  return wrong.empty() ? wrong : fmt::format("{}: {}", describe(call), wrong);
}

}  // namespace accelmgr::collective::contract
