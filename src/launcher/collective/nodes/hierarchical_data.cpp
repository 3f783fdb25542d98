// The collectives of data. Each takes its buffers through the steps in parts that are small enough for one
// exchange.
#include <algorithm>
#include <cstring>
#include <memory>

#include "launcher/collective/kernels/kernels.hpp"
#include "launcher/collective/nodes/hierarchical.hpp"
#include "launcher/collective/nodes/hierarchical_steps.hpp"
#include "launcher/collective/signature/argument_checks.hpp"
#include "launcher/collective/tcp/algorithms.hpp"

namespace accelmgr::collective {
namespace {

/// How many elements of each of `blocks` blocks go in one part.
std::size_t elements_at_once(std::size_t blocks, std::size_t element_bytes) {
  return std::max<std::size_t>(tcp::most_bytes_at_once / element_bytes / blocks, 1);
}

std::byte* bytes_of(void* data) noexcept { return static_cast<std::byte*>(data); }
const std::byte* bytes_of(const void* data) noexcept { return static_cast<const std::byte*>(data); }

/// In a buffer with a block of `bytes` for each member: where a part of a member's block begins, `done` bytes
/// after the begin of that block.
std::size_t part_of(int member, std::size_t bytes, std::size_t done) noexcept {
  return index(member) * bytes + done;
}

/// Half-precision inputs are reduced in float32 from beginning to end and rounded once.
class Working {
 public:
  explicit Working(DType dtype) noexcept
      : dtype_(dtype), halves_(dtype == DType::float16 || dtype == DType::bfloat16) {}
  DType dtype() const noexcept { return halves_ ? DType::float32 : dtype_; }
  std::size_t element_bytes() const noexcept { return size_of(dtype()); }
  bool halves() const noexcept { return halves_; }
  void load(const void* in, void* work, std::size_t count) const noexcept {
    if (halves_)
      best_kernels().widen(dtype_, in, static_cast<float*>(work), count);
    else if (in != work)
      best_kernels().copy(work, in, count * size_of(dtype_), Stores::cached);
  }
  void store(const void* work, void* out, std::size_t count) const noexcept {
    if (halves_)
      best_kernels().narrow(dtype_, static_cast<const float*>(work), out, count);
    else if (work != out)
      best_kernels().copy(out, work, count * size_of(dtype_), Stores::cached);
  }

 private:
  DType dtype_;
  bool halves_;
};

/// avg is summed first; the division is the last step.
ReduceOp without_division(ReduceOp op) noexcept { return op == ReduceOp::avg ? ReduceOp::sum : op; }

std::unique_ptr<std::byte[]> scratch(std::size_t bytes) {
  return std::make_unique_for_overwrite<std::byte[]>(bytes);
}

}  // namespace

void Hierarchical::all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                              const CallOptions& options) {
  check_reduction(dtype, op);
  const auto call = begin(CallKind::all_reduce, count, dtype, op, 0, options);
  agree(call);
  reduce(call, in, out, count);
}

void Hierarchical::reduce(const Call& call, const void* in, void* out, std::size_t count) {
  const auto dtype = call.signature.dtype;
  const auto op = call.signature.op;
  const Working working(dtype);
  const auto most = elements_at_once(1, working.element_bytes());
  const auto wide = working.halves() ? scratch(std::min(most, count) * working.element_bytes()) : nullptr;
  for (std::size_t done = 0; done < count; done += most) {
    const auto n = std::min(most, count - done);
    const auto* from = bytes_of(in) + done * size_of(dtype);
    auto* to = bytes_of(out) + done * size_of(dtype);
    if (working.halves()) working.load(from, wide.get(), n);
    auto* work = working.halves() ? wide.get() : to;
    locally(call, [&](Communicator& local, const CallOptions& local_options) {
      local.all_reduce(working.halves() ? work : from, leads() ? work : nullptr, n, working.dtype(),
                       without_division(op), local_options);
    });
    between_nodes(call, [&](tcp::Mesh& mesh) {
      tcp::all_reduce(mesh, work, work, n, working.dtype(), op, world(), call.deadline);
      working.store(work, to, n);
    });
    share(call, to, n * size_of(dtype));
  }
}

void Hierarchical::reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                                  const CallOptions& options) {
  check_reduction(dtype, op);
  const auto call = begin(CallKind::reduce_scatter, count, dtype, op, 0, options);
  agree(call);
  const auto block = count * size_of(dtype);
  const auto all = scratch(world() * block);
  reduce(call, in, all.get(), world() * count);
  std::copy_n(all.get() + part_of(rank(), block, 0), block, bytes_of(out));
}

void Hierarchical::all_gather(const void* in, void* out, std::size_t count, DType dtype,
                              const CallOptions& options) {
  const auto call = begin(CallKind::all_gather, count, dtype, ReduceOp::sum, 0, options);
  agree(call);
  const auto bytes = count * size_of(dtype);
  const auto most = std::min(elements_at_once(world(), 1), bytes);
  const auto all = scratch(world() * most);
  for (std::size_t done = 0; done < bytes; done += most) {
    const auto n = std::min(most, bytes - done);
    locally(call, [&](Communicator& local, const CallOptions& local_options) {
      local.all_gather(bytes_of(in) + done, all.get() + bases_[layout_.node] * n, n, DType::uint8,
                       local_options);
    });
    between_nodes(call,
                  [&](tcp::Mesh& mesh) { tcp::all_gather(mesh, all.get(), per_node(n), call.deadline); });
    share(call, all.get(), world() * n);
    for (std::size_t i = 0; i < world(); ++i)
      std::memcpy(bytes_of(out) + part_of(order_[i], bytes, done), all.get() + i * n, n);
  }
}

void Hierarchical::broadcast(void* data, std::size_t count, DType dtype, int root,
                             const CallOptions& options) {
  check_member(root, size(), "root");
  const auto call = begin(CallKind::broadcast, count, dtype, ReduceOp::sum, root, options);
  agree(call);
  const auto bytes = count * size_of(dtype);
  const auto source = layout_.node_of(root);
  for (std::size_t done = 0; done < bytes; done += tcp::most_bytes_at_once) {
    const auto n = std::min(tcp::most_bytes_at_once, bytes - done);
    auto* part = bytes_of(data) + done;
    if (layout_.node == source)
      locally(call, [&](Communicator& local, const CallOptions& local_options) {
        local.broadcast(part, n, DType::uint8, static_cast<int>(layout_.local_of(root)), local_options);
      });
    between_nodes(call, [&](tcp::Mesh& mesh) {
      tcp::broadcast(mesh, part, n, static_cast<int>(source), call.deadline);
    });
    if (layout_.node != source) share(call, part, n);
  }
}

void Hierarchical::all_to_all(const void* in, void* out, std::size_t count, DType dtype,
                              const CallOptions& options) {
  const auto call = begin(CallKind::all_to_all, count, dtype, ReduceOp::sum, 0, options);
  agree(call);
  const auto bytes = count * size_of(dtype);
  const auto largest_node = std::ranges::max(per_node(1));
  const auto most = std::min(elements_at_once(world() * largest_node, 1), bytes);
  const auto mine = scratch(world() * most);                 // [to]
  const auto of_node = scratch(locals() * world() * most);   // [local][to]
  const auto leaving = scratch(locals() * world() * most);   // [node][local][to, there]
  const auto arriving = scratch(world() * locals() * most);  // [from][local]
  for (std::size_t done = 0; done < bytes; done += most) {
    const auto n = std::min(most, bytes - done);
    for (std::size_t i = 0; i < world(); ++i)
      std::memcpy(mine.get() + i * n, bytes_of(in) + part_of(order_[i], bytes, done), n);
    locally(call, [&](Communicator& local, const CallOptions& local_options) {
      local.all_gather(mine.get(), of_node.get(), world() * n, DType::uint8, local_options);
    });
    between_nodes(call, [&](tcp::Mesh& mesh) {
      auto* place = leaving.get();
      for (std::size_t node = 0; node < layout_.nodes.size(); ++node)
        for (std::size_t local = 0; local < locals(); ++local) {
          const auto there = layout_.nodes[node].size() * n;
          std::memcpy(place, of_node.get() + (local * world() + bases_[node]) * n, there);
          place += there;
        }
      tcp::all_to_all(mesh, leaving.get(), arriving.get(), per_node(locals() * n), call.deadline);
    });
    share(call, arriving.get(), world() * locals() * n);
    for (std::size_t i = 0; i < world(); ++i)
      std::memcpy(bytes_of(out) + part_of(order_[i], bytes, done),
                  arriving.get() + (i * locals() + layout_.local) * n, n);
  }
}

}  // namespace accelmgr::collective
