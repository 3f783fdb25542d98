#include "nccl_faults.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <string>

#include "engine/support/fake_nccl.hpp"

namespace accelmgr::test {
namespace {

using device::NcclCode;
namespace nccl_code = device::nccl_code;

// Of this process, for functions that are no closures.
std::string fault, once, own_mark;
device::Nccl whole;

/// Returns whether this call has made the file.
bool make_file(const std::string& path) {
  const int made = open(path.c_str(), O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (made >= 0) close(made);
  return made >= 0;
}

bool strikes(const char* name) { return fault == name && make_file(once); }

constexpr device::Code launch_failure = 719;

/// In a rank that the fault spreads to.
void break_with_the_other() {
  if (access(once.c_str(), F_OK) == 0 && make_file(once + own_mark))
    FakeCuda::of_process().break_now(launch_failure);
}

NcclCode async_error(device::CommunicatorHandle handle, NcclCode* error) {
  break_with_the_other();
  return whole.async_error(handle, error);
}

NcclCode abort_after_the_other(device::CommunicatorHandle handle) {
  break_with_the_other();
  return whole.abort(handle);
}

NcclCode get_unique_id(device::NcclId* id) {
  return strikes("refuse_id") ? nccl_code::system_error : whole.get_unique_id(id);
}

NcclCode init_rank(device::CommunicatorHandle* handle, int size, device::NcclId id, int rank,
                   device::NcclConfig* config) {
  if (strikes("kill_join")) raise(SIGKILL);
  if (strikes("refuse_join")) return nccl_code::system_error;
  if (strikes("hang_join"))
    for (;;) pause();
  if (strikes("absent")) whole.get_unique_id(&id);
  return whole.init_rank(handle, size, id, rank, config);
}

NcclCode abort(device::CommunicatorHandle handle) {
  if (strikes("hang_abort"))
    for (;;) pause();
  return whole.abort(handle);
}

NcclCode reduce_scatter(const void* from, void* to, std::size_t count, device::NcclType type,
                        device::NcclOperation operation, device::CommunicatorHandle handle,
                        device::StreamHandle stream) {
  if (strikes("kill_sum")) raise(SIGKILL);
  if (strikes("fail_sum")) return nccl_code::internal_error;
  if (strikes("break_sum")) {
    FakeCuda::of_process().break_now(launch_failure);
    return nccl_code::unhandled_cuda_error;
  }
  return whole.reduce_scatter(from, to, count, type, operation, handle, stream);
}

NcclCode all_gather(const void* from, void* to, std::size_t count, device::NcclType type,
                    device::CommunicatorHandle handle, device::StreamHandle stream) {
  if (strikes("kill_gather")) raise(SIGKILL);
  if (strikes("fail_gather")) return nccl_code::internal_error;
  return whole.all_gather(from, to, count, type, handle, stream);
}

}  // namespace

device::Nccl nccl_of_rank(const Config& config, int rank) {
  FakeNccl::of_process();
  whole = FakeNccl::table();
  const auto& options = config.model.options;
  const auto found = options.find("nccl_fault");
  if (found == options.end()) return whole;
  once = options.at("nccl_fault_once");
  if (std::stoi(found->second) != rank) {
    if (!options.contains("nccl_fault_spreads")) return whole;
    own_mark = "-" + std::to_string(rank);
    auto table = whole;
    table.async_error = async_error;
    table.abort = abort_after_the_other;
    return table;
  }
  fault = found->second.substr(found->second.find(':') + 1);
  auto table = whole;
  table.get_unique_id = get_unique_id;
  table.init_rank = init_rank;
  table.abort = abort;
  table.reduce_scatter = reduce_scatter;
  table.all_gather = all_gather;
  return table;
}

}  // namespace accelmgr::test
