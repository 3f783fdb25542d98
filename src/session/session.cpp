#include "session/session.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

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

Session::Session(std::vector<base::UniqueFd> fds, ipc::Mapping map, std::vector<ipc::Mapping> slabs,
                 std::unique_ptr<const Header> header)
    : fds_(std::move(fds)), map_(std::move(map)), slabs_(std::move(slabs)), header_(std::move(header)) {}

Session Session::create(const Extent& extent, int ranks, int populate_threads) {
  if (extent.slots > 0 && extent.batch_size == 0)
    throw SessionError("a session with queues needs a batch size of 1 or more");
  auto header = std::make_unique<Header>();
  auto& plan = *header;
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
  Session session(std::move(fds), std::move(map), std::move(slabs), std::move(header));
  for (int rank = 0; rank < ranks; ++rank) session.allocate_slab(rank, populate_threads);
  session.control().word.store(initial_step_word);
  for (int rank = 0; rank < extent.ranks; ++rank) session.queue(rank).end.store(~std::uint64_t{0});
  return session;
}

Session::Checked Session::map_checked(int fd, ipc::Access access) {
  const auto bytes = ipc::sealed_bytes(fd, "the memory of a session");
  if (bytes < sizeof(Header))
    throw SessionError(
        fmt::format("the memory passed is not a session: it has {} bytes; the header alone has {}", bytes,
                    sizeof(Header)));
  ipc::Mapping map(fd, 0, bytes, access);
  const auto& stated = *reinterpret_cast<const Header*>(map.data());
  if (stated.magic.load() != magic)
    throw SessionError("the memory passed is not an accelmgr session (its magic word differs)");
  if (stated.layout_version != layout_version || stated.fingerprint != build_fingerprint())
    throw SessionError(fmt::format(
        "the session has layout {} (build {:016x}), but this program has layout {} (build {:016x}): "
        "both must come from the same build",
        stated.layout_version, stated.fingerprint, layout_version, build_fingerprint()));
  auto header = std::make_unique<Header>();
  plan_stated_layout(stated, bytes, *header);
  return {std::move(map), std::move(header)};
}

Session Session::observe(const base::UniqueFd& fd) {
  auto [map, header] = map_checked(fd.get(), ipc::Access::read);
  return {{}, std::move(map), {}, std::move(header)};
}

Session Session::attach(std::vector<base::UniqueFd> fds, int protect_for_rank, bool protect_parameters) {
  if (fds.empty()) throw SessionError("a session needs at least one memfd; none was passed");
  auto [map, header] = map_checked(fds[0].get(), ipc::Access::read_write);
  if (fds.size() != 1 + header->ranks)
    throw SessionError(fmt::format("a session of {} ranks has {} memfds; {} were passed", header->ranks,
                                   1 + header->ranks, fds.size()));
  std::vector<ipc::Mapping> slabs;
  for (int rank = 0; rank < static_cast<int>(header->ranks); ++rank) {
    const int slab = fds[1 + static_cast<std::size_t>(rank)].get();
    if (const auto slab_bytes = ipc::sealed_bytes(slab, fmt::format("the slab of rank {}", rank));
        slab_bytes != header->slab_bytes)
      throw SessionError(fmt::format("the slab of rank {} has {} bytes; it must have {}", rank, slab_bytes,
                                     header->slab_bytes));
    const bool foreign = protect_for_rank >= 0 && rank != protect_for_rank;
    slabs.emplace_back(slab, 0, header->slab_bytes, foreign ? ipc::Access::read : ipc::Access::read_write);
  }
  Session session(std::move(fds), std::move(map), std::move(slabs), std::move(header));
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
  ipc::populate_read(at<std::byte>(header_->parameters), master_bytes());
  ipc::populate(at<std::byte>(header_->gradients), master_bytes(), 1);
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

void Session::publish() noexcept { at<Header>(0)->magic.store(magic); }

bool Session::make_private() noexcept {
  bool done = map_.make_private();
  for (const auto& slab : slabs_) done = slab.forget() && done;
  fds_.clear();
  return done;
}

std::vector<int> Session::fds() const {
  std::vector<int> out;
  for (const auto& fd : fds_) out.push_back(fd.get());
  return out;
}

SourceState& Session::valid_source_state() const {
  auto& sharding = *at<Sharding>(header_->sharding);
  const auto index = sharding.source_index.load(std::memory_order_acquire);
  if (index > 1)
    throw SessionError(
        fmt::format("the index of the data source's valid state is {}; it must be 0 or 1", index));
  auto& state = sharding.source[index];
  if (state.bytes > source_state_bytes)
    throw SessionError(fmt::format("the state of the data source has {} bytes; it must have at most {}",
                                   state.bytes, source_state_bytes));
  return state;
}

std::span<std::atomic<std::uint64_t>> Session::tags_of(int rank) const noexcept {
  return {reinterpret_cast<std::atomic<std::uint64_t>*>(slabs_[static_cast<std::size_t>(rank)].data()),
          header_->tensors};
}

}  // namespace accelmgr::session
