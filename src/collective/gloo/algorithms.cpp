#include "collective/gloo/algorithms.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "collective/kernels.hpp"

namespace accelmgr::collective::gloo {
namespace {

/// Up to this size, one step in which all ranks send everything to all is faster than two steps with a part
/// each.
constexpr std::size_t one_step_bytes = std::size_t{32} << 10;

std::size_t index(int rank) noexcept { return static_cast<std::size_t>(rank); }

std::byte* at(void* data, std::size_t bytes) noexcept { return static_cast<std::byte*>(data) + bytes; }
const std::byte* at(const void* data, std::size_t bytes) noexcept {
  return static_cast<const std::byte*>(data) + bytes;
}

/// Where the blocks begin. A last entry says where the last block ends.
std::vector<std::size_t> offsets_of(std::span<const std::size_t> lengths) {
  std::vector<std::size_t> offsets(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), offsets.begin() + 1);
  return offsets;
}

/// Cuts `count` elements into one part for each rank. All parts but the last are whole cache lines.
std::vector<std::size_t> parts_of(std::size_t count, int ranks) {
  constexpr std::size_t line = 64;
  const auto each = (count / index(ranks) + line) / line * line;
  std::vector<std::size_t> parts(index(ranks));
  for (auto& part : parts) {
    part = std::min(each, count);
    count -= part;
  }
  return parts;
}

std::vector<std::size_t> times(std::vector<std::size_t> counts, std::size_t factor) {
  for (auto& count : counts) count *= factor;
  return counts;
}

/// The blocks of `bytes` each that the other ranks sent, and this rank's own: `inputs` in the order of ranks.
struct Received {
  std::unique_ptr<std::byte[]> memory;
  std::vector<const void*> inputs;
};

/// Sends each rank its block of `in`, and receives a block of this rank's size from each.
Received exchange_parts(Mesh& mesh, const void* in, std::span<const std::size_t> offsets,
                        std::span<const std::size_t> sent, base::Deadline deadline) {
  const auto bytes = sent[index(mesh.rank())];
  Received received{std::make_unique_for_overwrite<std::byte[]>(bytes * index(mesh.size())), {}};
  std::vector<Mesh::Send> sends;
  std::vector<Mesh::Receive> receives;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    const auto* own = at(in, offsets[index(rank)]);
    auto* place = received.memory.get() + bytes * index(rank);
    received.inputs.push_back(rank == mesh.rank() ? own : place);
    if (rank == mesh.rank()) continue;
    sends.push_back({rank, own, sent[index(rank)]});
    receives.push_back({rank, place, bytes});
  }
  mesh.exchange(sends, receives, deadline);
  return received;
}

void all_reduce_part(Mesh& mesh, const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                     std::size_t divisor, base::Deadline deadline) {
  const auto element = size_of(dtype);
  const auto& kernels = best_kernels();
  if (count * element <= one_step_bytes) {
    const std::vector<std::size_t> offsets(index(mesh.size()), 0);
    const std::vector<std::size_t> lengths(index(mesh.size()), count * element);
    const auto received = exchange_parts(mesh, in, offsets, lengths, deadline);
    kernels.reduce(dtype, op, received.inputs, out, count, divisor);
    return;
  }
  const auto counts = parts_of(count, mesh.size());
  const auto bytes = times(counts, element);
  const auto offsets = offsets_of(bytes);
  const auto own = index(mesh.rank());
  const auto received = exchange_parts(mesh, in, offsets, bytes, deadline);
  kernels.reduce(dtype, op, received.inputs, at(out, offsets[own]), counts[own], divisor);
  all_gather(mesh, out, bytes, deadline);
}

}  // namespace

void all_reduce(Mesh& mesh, const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                std::size_t divisor, base::Deadline deadline) {
  const auto element = size_of(dtype);
  const auto most = most_bytes_at_once / element;
  for (std::size_t done = 0; done < count; done += most)
    all_reduce_part(mesh, at(in, done * element), at(out, done * element), std::min(most, count - done),
                    dtype, op, divisor, deadline);
}

void reduce_scatter(Mesh& mesh, const void* in, void* out, std::span<const std::size_t> counts, DType dtype,
                    ReduceOp op, std::size_t divisor, base::Deadline deadline) {
  const auto element = size_of(dtype);
  const auto blocks = offsets_of(times({counts.begin(), counts.end()}, element));
  const auto most = std::max<std::size_t>(most_bytes_at_once / element / counts.size(), 1);
  const auto longest = *std::ranges::max_element(counts);
  for (std::size_t done = 0; done < longest; done += most) {
    std::vector<std::size_t> sent;
    std::vector<std::size_t> offsets;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      sent.push_back(std::min(most, counts[i] - std::min(done, counts[i])) * element);
      offsets.push_back(blocks[i] + std::min(done, counts[i]) * element);
    }
    const auto received = exchange_parts(mesh, in, offsets, sent, deadline);
    const auto own = sent[index(mesh.rank())] / element;
    if (own != 0) best_kernels().reduce(dtype, op, received.inputs, at(out, done * element), own, divisor);
  }
}

void all_gather(Mesh& mesh, void* out, std::span<const std::size_t> bytes, base::Deadline deadline) {
  const auto offsets = offsets_of(bytes);
  const auto own = index(mesh.rank());
  std::vector<Mesh::Send> sends;
  std::vector<Mesh::Receive> receives;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    if (rank == mesh.rank()) continue;
    sends.push_back({rank, at(out, offsets[own]), bytes[own]});
    receives.push_back({rank, at(out, offsets[index(rank)]), bytes[index(rank)]});
  }
  mesh.exchange(sends, receives, deadline);
}

void broadcast(Mesh& mesh, void* data, std::size_t bytes, int root, base::Deadline deadline) {
  // Long data: root sends each rank a part, and the ranks send the parts to each other. So root's link
  // carries the data once.
  const bool in_parts = bytes > one_step_bytes && mesh.size() > 2;
  auto parts = in_parts ? parts_of(bytes, mesh.size()) : std::vector<std::size_t>(index(mesh.size()), bytes);
  const auto offsets = in_parts ? offsets_of(parts) : std::vector<std::size_t>(index(mesh.size()), 0);
  std::vector<Mesh::Send> sends;
  std::vector<Mesh::Receive> receives;
  const auto own = index(mesh.rank());
  if (mesh.rank() != root) receives.push_back({root, at(data, offsets[own]), parts[own]});
  for (int rank = 0; rank < mesh.size() && mesh.rank() == root; ++rank)
    if (rank != root) sends.push_back({rank, at(data, offsets[index(rank)]), parts[index(rank)]});
  mesh.exchange(sends, receives, deadline);
  if (!in_parts) return;
  sends.clear();
  receives.clear();
  for (int rank = 0; rank < mesh.size(); ++rank) {
    if (rank == mesh.rank()) continue;
    if (rank != root) sends.push_back({rank, at(data, offsets[own]), parts[own]});
    if (mesh.rank() != root) receives.push_back({rank, at(data, offsets[index(rank)]), parts[index(rank)]});
  }
  mesh.exchange(sends, receives, deadline);
}

void all_to_all(Mesh& mesh, const void* in, std::span<const std::size_t> sent, void* out,
                std::span<const std::size_t> received, base::Deadline deadline) {
  const auto from = offsets_of(sent);
  const auto to = offsets_of(received);
  std::vector<Mesh::Send> sends;
  std::vector<Mesh::Receive> receives;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    const auto i = index(rank);
    if (rank == mesh.rank()) {
      if (sent[i] != 0) std::memmove(at(out, to[i]), at(in, from[i]), sent[i]);
      continue;
    }
    sends.push_back({rank, at(in, from[i]), sent[i]});
    receives.push_back({rank, at(out, to[i]), received[i]});
  }
  mesh.exchange(sends, receives, deadline);
}

std::vector<std::string> all_gather_objects(Mesh& mesh, std::string_view object, base::Deadline deadline) {
  std::vector<std::uint64_t> lengths(index(mesh.size()));
  lengths[index(mesh.rank())] = object.size();
  all_gather(mesh, lengths.data(), std::vector<std::size_t>(lengths.size(), sizeof lengths[0]), deadline);
  std::vector<std::string> objects;
  std::vector<Mesh::Send> sends;
  std::vector<Mesh::Receive> receives;
  objects.reserve(lengths.size());
  for (int rank = 0; rank < mesh.size(); ++rank) {
    auto& place = objects.emplace_back(rank == mesh.rank() ? std::string(object)
                                                           : std::string(lengths[index(rank)], '\0'));
    if (rank == mesh.rank()) continue;
    sends.push_back({rank, object.data(), object.size()});
    receives.push_back({rank, place.data(), place.size()});
  }
  mesh.exchange(sends, receives, deadline);
  return objects;
}

std::string broadcast_object(Mesh& mesh, std::string_view object, int root, base::Deadline deadline) {
  std::uint64_t length = object.size();
  broadcast(mesh, &length, sizeof length, root, deadline);
  std::string result = mesh.rank() == root ? std::string(object) : std::string(length, '\0');
  broadcast(mesh, result.data(), result.size(), root, deadline);
  return result;
}

}  // namespace accelmgr::collective::gloo
