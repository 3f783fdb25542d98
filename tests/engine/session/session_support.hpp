// Small sessions for the tests of this floor.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "base/unique_fd.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/session.hpp"

namespace accelmgr::session {

struct SmallSession {
  Manifest manifest;
  Session session;
};

/// A tensor of one dimension.
inline TensorEntry tensor_of(std::uint64_t count, DType dtype = DType::float32, Group group = Group::decay,
                             const std::string& name = "w") {
  return {.name = name,
          .aliases = {},
          .shape = {static_cast<std::int64_t>(count)},
          .dtype = dtype,
          .runner_dtype = dtype,
          .count = count,
          .group = group};
}

/// A session with that manifest; sets the manifest's places. A slot holds a batch of 64 elements and has at
/// least `slot_bytes`.
inline Session session_of(Manifest& manifest, int ranks, std::uint64_t slots = 2,
                          std::uint64_t slot_bytes = 64) {
  Extent extent{.ranks = ranks, .bytes = manifest.place_tensors()};
  extent.tensors = manifest.tensors.size();
  extent.buffer_bytes = manifest.place_buffers();
  extent.slots = slots;
  extent.batch_size = 64;
  extent.slot_bytes = std::max(slot_bytes, manifest.place_fields(extent.batch_size));
  extent.manifest_bytes = manifest_bytes(manifest);
  auto session = Session::create(extent, extent.ranks, 1);
  write_manifest(manifest, session.manifest());
  session.publish();
  return session;
}

/// A session with one float32 tensor for each of `counts`, and queues of `slots` slots of `slot_bytes`.
inline SmallSession small_session(int ranks, const std::vector<std::uint64_t>& counts,
                                  std::uint64_t slots = 2, std::uint64_t slot_bytes = 64) {
  Manifest manifest;
  for (std::size_t i = 0; i < counts.size(); ++i)
    manifest.tensors.push_back(tensor_of(counts[i], DType::float32, Group::decay, "w" + std::to_string(i)));
  manifest.buffers.push_back(
      {.name = "running", .shape = {2}, .dtype = DType::float32, .offset = 0, .bytes = 8});
  manifest.buffers.push_back(
      {.name = "batches", .shape = {}, .dtype = DType::int64, .offset = 0, .bytes = 8});
  auto session = session_of(manifest, ranks, slots, slot_bytes);
  return {std::move(manifest), std::move(session)};
}

/// What another process attaches the session with.
inline std::vector<base::UniqueFd> descriptors_of(const Session& session) {
  std::vector<base::UniqueFd> out;
  for (const int fd : session.fds()) out.push_back(base::duplicate(fd));
  return out;
}

/// The address of the session's memory in this process.
inline std::byte* memory_of(Session& s) {
  return reinterpret_cast<std::byte*>(&s.control()) - s.header().control;
}

/// The memory that a descriptor of a session has.
inline std::uint64_t allocated_bytes(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 ? static_cast<std::uint64_t>(status.st_blocks) * 512 : 0;
}

// Of a session whose tensors are float32.
inline std::span<float> gradients_of(Session& s) {
  return {reinterpret_cast<float*>(s.gradients()), s.header().bytes.gradients / sizeof(float)};
}
inline std::span<float> slab_of(Session& s, int rank) {
  return {reinterpret_cast<float*>(s.slab(rank)), s.header().bytes.slab / sizeof(float)};
}

}  // namespace accelmgr::session
