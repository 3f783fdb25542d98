#include "launcher/collective/tcp/algorithms.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "launcher/collective/kernels/kernels.hpp"

namespace accelmgr::collective::tcp {
namespace {

/// Up to this size, one step in which all ranks send everything to all is faster than two steps with a part
/// each.
constexpr std::size_t one_step_bytes = std::size_t{32} << 10;

std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }

std::byte* at(void* data, std::size_t bytes) noexcept { return static_cast<std::byte*>(data) + bytes; }
const std::byte* at(const void* data, std::size_t bytes) noexcept {
  return static_cast<const std::byte*>(data) + bytes;
}

/// Where a buffer has the block of each rank.
struct Blocks {
  std::vector<std::size_t> offsets, bytes;
};

Blocks one_after_another(std::vector<std::size_t> bytes) {
  std::vector<std::size_t> offsets(bytes.size());
  std::exclusive_scan(bytes.begin(), bytes.end(), offsets.begin(), std::size_t{0});
  return {std::move(offsets), std::move(bytes)};
}

/// The same block for every rank.
Blocks same_for_all(const Mesh& mesh, std::size_t offset, std::size_t bytes) {
  const auto ranks = index(mesh.size());
  return {std::vector(ranks, offset), std::vector(ranks, bytes)};
}

/// Cuts `count` elements into one part for each rank; returns their bytes. All parts but the last are whole
/// cache lines.
std::vector<std::size_t> parts_of(std::size_t count, int ranks, std::size_t element_bytes = 1) {
  constexpr std::size_t line = 64;
  const auto each = (count / index(ranks) + line) / line * line;
  std::vector<std::size_t> parts(index(ranks));
  for (auto& part : parts) {
    part = std::min(each, count) * element_bytes;
    count -= part / element_bytes;
  }
  return parts;
}

/// Sends each other rank its block of `in`, and receives from each its block of `out`.
void exchange(Mesh& mesh, const void* in, const Blocks& sent, void* out, const Blocks& received,
              base::Deadline deadline) {
  std::vector<Mesh::Send> sends;
  std::vector<Mesh::Receive> receives;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    if (rank == mesh.rank()) continue;
    sends.push_back({rank, at(in, sent.offsets[index(rank)]), sent.bytes[index(rank)]});
    receives.push_back({rank, at(out, received.offsets[index(rank)]), received.bytes[index(rank)]});
  }
  mesh.exchange(sends, receives, deadline);
}

/// The inputs of a reduction, in the order of ranks: this rank's block in the buffer of all ranks.
struct Inputs {
  std::unique_ptr<std::byte[]> memory;
  std::vector<const void*> blocks;
};

/// Sends each rank its block of `in`, and receives this rank's block from each.
Inputs exchange_inputs(Mesh& mesh, const void* in, const Blocks& sent, base::Deadline deadline) {
  const auto own = index(mesh.rank());
  const auto each = one_after_another(std::vector(index(mesh.size()), sent.bytes[own]));
  Inputs inputs{std::make_unique_for_overwrite<std::byte[]>(sent.bytes[own] * index(mesh.size())), {}};
  exchange(mesh, in, sent, inputs.memory.get(), each, deadline);
  for (const auto offset : each.offsets) inputs.blocks.push_back(inputs.memory.get() + offset);
  inputs.blocks[own] = at(in, sent.offsets[own]);
  return inputs;
}

}  // namespace

void all_reduce(Mesh& mesh, const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                std::size_t divisor, base::Deadline deadline) {
  const auto element = size_of(dtype);
  const auto& kernels = best_kernels();
  if (count * element <= one_step_bytes) {
    const auto inputs = exchange_inputs(mesh, in, same_for_all(mesh, 0, count * element), deadline);
    return kernels.reduce(dtype, op, inputs.blocks, out, count, divisor);
  }
  const auto parts = one_after_another(parts_of(count, mesh.size(), element));
  const auto own = index(mesh.rank());
  const auto inputs = exchange_inputs(mesh, in, parts, deadline);
  kernels.reduce(dtype, op, inputs.blocks, at(out, parts.offsets[own]), parts.bytes[own] / element, divisor);
  all_gather(mesh, out, parts.bytes, deadline);
}

void all_gather(Mesh& mesh, void* out, const std::vector<std::size_t>& bytes, base::Deadline deadline) {
  const auto blocks = one_after_another(bytes);
  const auto own = index(mesh.rank());
  exchange(mesh, out, same_for_all(mesh, blocks.offsets[own], bytes[own]), out, blocks, deadline);
}

void broadcast(Mesh& mesh, void* data, std::size_t bytes, int root, base::Deadline deadline) {
  // Long data: root sends each rank a part, and the ranks send the parts to each other. So root's link
  // carries the data once.
  const bool in_parts = bytes > one_step_bytes && mesh.size() > 2;
  const auto parts =
      in_parts ? one_after_another(parts_of(bytes, mesh.size())) : same_for_all(mesh, 0, bytes);
  const auto nothing = same_for_all(mesh, 0, 0);
  const bool is_root = mesh.rank() == root;
  auto own = same_for_all(mesh, parts.offsets[index(mesh.rank())], parts.bytes[index(mesh.rank())]);
  auto from_root = own;
  for (int rank = 0; rank < mesh.size(); ++rank)
    if (rank != root) from_root.bytes[index(rank)] = 0;
  exchange(mesh, data, is_root ? parts : nothing, data, is_root ? nothing : from_root, deadline);
  if (!in_parts) return;
  own.bytes[index(root)] = 0;  // It has all.
  exchange(mesh, data, own, data, is_root ? nothing : parts, deadline);
}

void all_to_all(Mesh& mesh, const void* in, void* out, const std::vector<std::size_t>& bytes,
                base::Deadline deadline) {
  const auto blocks = one_after_another(bytes);
  const auto own = index(mesh.rank());
  std::memcpy(at(out, blocks.offsets[own]), at(in, blocks.offsets[own]), bytes[own]);
  exchange(mesh, in, blocks, out, blocks, deadline);
}

std::string all_gather_objects(Mesh& mesh, std::string_view object, base::Deadline deadline) {
  std::vector<std::size_t> lengths(index(mesh.size()));
  lengths[index(mesh.rank())] = object.size();
  all_gather(mesh, lengths.data(), std::vector(lengths.size(), sizeof lengths[0]), deadline);
  std::string objects(std::reduce(lengths.begin(), lengths.end()), '\0');
  object.copy(objects.data() + one_after_another(lengths).offsets[index(mesh.rank())], object.size());
  all_gather(mesh, objects.data(), lengths, deadline);
  return objects;
}

std::string broadcast_object(Mesh& mesh, std::string_view object, int root, base::Deadline deadline) {
  std::uint64_t length = object.size();
  broadcast(mesh, &length, sizeof length, root, deadline);
  std::string result = mesh.rank() == root ? std::string(object) : std::string(length, '\0');
  broadcast(mesh, result.data(), result.size(), root, deadline);
  return result;
}

}  // namespace accelmgr::collective::tcp
