#include "engine/session/session.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/ipc/pages.hpp"

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

Session Session::create(const Extent& extent, int ranks, int populate_threads, ipc::Allocate parameters) {
  if (extent.slots > 0 && extent.batch_size == 0)
    throw SessionError("a session with queues needs a batch size of 1 or more");
  auto header = std::make_unique<Header>();
  auto& plan = *header;
  plan_layout(extent, plan);
  std::vector<base::UniqueFd> fds;
  std::vector<ipc::Mapping> slabs;
  fds.push_back(ipc::create_memfd("accelmgr-session", plan.total_bytes, ipc::Allocate::later));
  ipc::Mapping map(fds[0].get(), 0, plan.total_bytes, ipc::Access::read_write);
  const auto allocate = [&](std::uint64_t begin, std::uint64_t end) {
    if (begin == end) return;
    ipc::allocate(fds[0].get(), begin, end - begin, "accelmgr-session");
    ipc::populate(map.data() + begin, end - begin, populate_threads);
  };
  const auto behind_parameters = plan.has_snapshot != 0 ? plan.snapshot : plan.gradients;
  allocate(0, parameters == ipc::Allocate::now ? behind_parameters : plan.parameters);
  allocate(behind_parameters, plan.gradients + plan.bytes.gradients);
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
  if (const auto bytes = session.header().bytes.parameters;
      protect_parameters && bytes > 0 &&
      mprotect(session.parameters(), ipc::whole_pages(bytes), PROT_READ) != 0)
    throw SystemError("mprotect of the master parameters", errno);
  return session;
}

void Session::allocate_slab(int rank, int populate_threads) const {
  const auto index = static_cast<std::size_t>(rank);
  const auto bytes = header_->slab_data_offset + header_->bytes.slab;
  ipc::allocate(fds_[1 + index].get(), 0, bytes, fmt::format("the slab of rank {}", rank));
  if (populate_threads > 0) ipc::populate(slabs_[index].data(), bytes, populate_threads);
}

void Session::allocate_room(std::uint64_t gradient, std::uint64_t bytes, std::uint64_t slab,
                            std::uint64_t slab_bytes, RankMask team) const {
  ipc::allocate(fds_[0].get(), header_->gradients + gradient, bytes, "the gradient of a parameter");
  for (int rank = 0; rank < ranks(); ++rank)
    if ((team >> rank & 1) != 0)
      ipc::allocate(fds_[1 + static_cast<std::size_t>(rank)].get(), header_->slab_data_offset + slab,
                    slab_bytes, fmt::format("the slab of rank {}", rank));
}

void Session::allocate_moments(Moments moments) const {
  const auto bytes = static_cast<std::uint64_t>(moments) * header_->bytes.trained;
  if (bytes == 0) return;
  ipc::allocate(fds_[0].get(), header_->moments, bytes, "the state of the optimizer");
}

ipc::Mapping Session::writable_parameters() const {
  return {fds_[0].get(), header_->parameters, header_->bytes.parameters, ipc::Access::read_write};
}

std::uint64_t Session::slab_bytes() const noexcept {
  return header_->slab_data_offset + header_->bytes.slab + control().unfrozen_slab_bytes.load();
}

std::uint64_t Session::used_bytes(int ranks) const noexcept {
  const auto moments = static_cast<std::uint64_t>(control().moments_allocated.load());
  return header_->gradients + header_->bytes.gradients + control().unfrozen_bytes.load() +
         moments * header_->bytes.trained + static_cast<std::uint64_t>(ranks) * slab_bytes();
}

void Session::populate_for(int rank, RankMask team) const {
  ipc::populate_read(at<std::byte>(header_->parameters), header_->bytes.parameters);
  ipc::populate(at<std::byte>(header_->gradients), header_->bytes.gradients, 1);
  const auto slab_bytes = header_->slab_data_offset + header_->bytes.slab;
  for (int other = 0; other < ranks(); ++other) {
    if ((team >> other & 1) == 0) continue;
    const auto& slab_map = slabs_[static_cast<std::size_t>(other)];
    if (other == rank) {
      ipc::populate(slab_map.data(), slab_bytes, 1);
    } else {
      ipc::populate_read(slab_map.data(), slab_bytes);
    }
  }
}

void Session::keep_from_children() const {
  map_.keep_from_children();
  for (const auto& slab : slabs_) slab.keep_from_children();
}

void Session::publish() noexcept { at<Header>(0)->magic.store(magic); }

void Session::make_private_in_children(bool shared) {
  private_in_children_ = shared ? ipc::PrivateInChildren() : ipc::PrivateInChildren(map_, fds_.at(0).get());
}

bool Session::make_private() noexcept {
  // Room that nobody has used would take memory when it is read.
  const bool uses_room =
      control().unfrozen_bytes.load() != 0 || control().moments_allocated.load() != Moments::none;
  bool done = map_.make_private(uses_room ? map_.size() : header_->gradients + header_->bytes.gradients);
  for (const auto& slab : slabs_) done = slab.forget() && done;
  private_in_children_.reset();
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

std::span<Tag> Session::tags_of(int rank) const noexcept {
  return {reinterpret_cast<Tag*>(slabs_[static_cast<std::size_t>(rank)].data()), header_->tensors};
}

std::uint64_t Session::reduction_progress(int rank) const noexcept {
  auto progress = record(rank).cursor.load();
  for (const auto& cursor : record(rank).more_cursors) progress += cursor.bits.load();
  for (const auto& cursor : record(rank).update_cursors) progress += cursor.bits.load();
  return progress;
}

}  // namespace accelmgr::session
