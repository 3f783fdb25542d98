#include "session/session.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstring>

#include "accelmgr/errors.hpp"

namespace accelmgr::session {
namespace {

constexpr const char* what_takes_less =
    "a smaller model, fewer runners or gradients.slab_dtype=bf16 need less";

}  // namespace

void check_memory(std::uint64_t bytes, std::uint64_t limit_bytes, std::uint64_t more_bytes) {
  if (limit_bytes > 0 && bytes > limit_bytes)
    throw SessionError(
        fmt::format("the session needs {} bytes of shared memory, memory.limit_bytes allows {}; {}", bytes,
                    limit_bytes, what_takes_less));
  const auto available = ipc::memory_available();
  if (more_bytes > available.bytes)
    throw SessionError(fmt::format("the session needs {} {}bytes of shared memory, {} are available ({}); {}",
                                   more_bytes, more_bytes < bytes ? "more " : "", available.bytes,
                                   available.limited_by, what_takes_less));
}

Session::Session(std::vector<base::UniqueFd> fds, ipc::Mapping map, std::vector<ipc::Mapping> slabs)
    : fds_(std::move(fds)),
      map_(std::move(map)),
      slabs_(std::move(slabs)),
      header_(reinterpret_cast<Header*>(map_.data())) {}

Session Session::create(const Extent& extent, int ranks, int populate_threads) {
  Header plan{};
  plan_layout(extent, plan);
  std::vector<base::UniqueFd> fds;
  std::vector<ipc::Mapping> slabs;
  fds.push_back(ipc::create_memfd("accelmgr-session", plan.total_bytes));
  ipc::Mapping map(fds[0].get(), 0, plan.total_bytes, ipc::Access::read_write);
  ipc::populate(map.data(), map.size(), populate_threads);
  for (int rank = 0; rank < extent.ranks; ++rank) {
    fds.push_back(
        ipc::create_memfd(fmt::format("accelmgr-slab{}", rank), plan.slab_bytes, ipc::Allocate::later));
    slabs.emplace_back(fds.back().get(), 0, plan.slab_bytes, ipc::Access::read_write);
  }
  std::memcpy(map.data(), &plan, sizeof plan);
  Session session(std::move(fds), std::move(map), std::move(slabs));
  for (int rank = 0; rank < ranks; ++rank) session.allocate_slab(rank, populate_threads);
  session.control().word.store(initial_step_word);
  for (int rank = 0; rank < extent.ranks; ++rank) session.queue(rank).end.store(~std::uint64_t{0});
  return session;
}

Session Session::attach(std::vector<base::UniqueFd> fds, int protect_for_rank, bool protect_parameters) {
  if (fds.empty()) throw SessionError("a session has at least one memfd, none was passed");
  struct stat status {};
  if (fstat(fds[0].get(), &status) != 0 || static_cast<std::size_t>(status.st_size) < sizeof(Header))
    throw SessionError("the first descriptor passed is no session: it is smaller than a header");
  ipc::Mapping map(fds[0].get(), 0, static_cast<std::size_t>(status.st_size), ipc::Access::read_write);
  const auto& header = *reinterpret_cast<const Header*>(map.data());
  if (header.magic.load() != magic)
    throw SessionError("the memory passed is no accelmgr session (its magic word differs)");
  if (header.layout_version != layout_version || header.fingerprint != build_fingerprint())
    throw SessionError(
        fmt::format("the session has layout {} (build {:016x}), this program layout {} (build {:016x}): both "
                    "must be the same build",
                    header.layout_version, header.fingerprint, layout_version, build_fingerprint()));
  if (fds.size() != 1 + header.ranks || header.total_bytes != static_cast<std::uint64_t>(status.st_size))
    throw SessionError(fmt::format("a session of {} ranks has {} memfds, {} were passed", header.ranks,
                                   1 + header.ranks, fds.size()));
  std::vector<ipc::Mapping> slabs;
  for (int rank = 0; rank < static_cast<int>(header.ranks); ++rank) {
    const bool foreign = protect_for_rank >= 0 && rank != protect_for_rank;
    slabs.emplace_back(fds[1 + static_cast<std::size_t>(rank)].get(), 0, header.slab_bytes,
                       foreign ? ipc::Access::read : ipc::Access::read_write);
  }
  Session session(std::move(fds), std::move(map), std::move(slabs));
  if (protect_parameters && session.master_bytes() > 0 &&
      mprotect(session.parameters(), align_up(session.master_bytes(), 4096), PROT_READ) != 0)
    throw SystemError("mprotect of the master parameters", errno);
  return session;
}

void Session::allocate_slab(int rank, int populate_threads) const {
  const auto index = static_cast<std::size_t>(rank);
  ipc::allocate(fds_[1 + index].get(), header_->slab_bytes, fmt::format("the slab of rank {}", rank));
  if (populate_threads > 0) ipc::populate(slabs_[index].data(), slabs_[index].size(), populate_threads);
}

void Session::populate_for(int rank, RankMask team) const {
  ipc::populate_read(parameters(), master_bytes());
  ipc::populate(gradients(), master_bytes(), 1);
  for (int other = 0; other < ranks(); ++other) {
    if ((team >> other & 1) == 0) continue;
    const auto& slab_map = slabs_[static_cast<std::size_t>(other)];
    if (other == rank) {
      ipc::populate(slab_map.data(), slab_map.size(), 1);
    } else {
      ipc::populate_read(slab_map.data(), slab_map.size());
    }
  }
}

void Session::keep_from_children() const {
  map_.keep_from_children();
  for (const auto& slab : slabs_) slab.keep_from_children();
}

void Session::publish() noexcept { header_->magic.store(magic); }

std::vector<int> Session::fds() const {
  std::vector<int> out;
  for (const auto& fd : fds_) out.push_back(fd.get());
  return out;
}

std::byte* Session::generator(std::uint32_t index, int rank) const noexcept {
  return copy(index) + align_up(sizeof(Counters), region_alignment) + std::size_t(rank) * generator_bytes;
}

std::byte* Session::buffers(std::uint32_t index, int rank) const noexcept {
  return generator(index, ranks()) + std::size_t(rank) * header_->buffer_bytes;
}

std::byte* Session::result_buffers(std::uint32_t index) const noexcept { return buffers(index, ranks()); }

std::span<std::atomic<std::uint64_t>> Session::tags(int rank) const noexcept {
  return {reinterpret_cast<std::atomic<std::uint64_t>*>(slabs_[static_cast<std::size_t>(rank)].data()),
          header_->tensors};
}

void Session::wake_everyone() const noexcept {
  for (ipc::Epoch* epoch : {&control().trigger, &control().votes, &control().finish, &control().life})
    ipc::wake_all(*epoch);
  for (int rank = 0; rank < ranks(); ++rank) ipc::wake_all(queue(rank).filled);
}

}  // namespace accelmgr::session
