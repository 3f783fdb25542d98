#include "engine/runner/rank_setup.hpp"

#include <algorithm>
#include <cstdlib>

#include "base/config/device_name.hpp"
#include "base/ipc/cores.hpp"
#include "engine/session/layout.hpp"

namespace accelmgr::runner {

using config::on_cpu;

std::uint64_t seed_of_rank(const Config& config, int rank) noexcept {
  return config.seed_base + static_cast<std::uint64_t>(rank);
}

namespace {

int share_of_cores(const Config& config) { return std::max(1, ipc::allowed_cores() / config.nprocs); }

}  // namespace

int compute_threads(const Config& config) {
  if (config.runners.threads > 0) return config.runners.threads;
  const int share = share_of_cores(config);
  return std::min(share, ipc::openmp_threads().value_or(share));
}

int streaming_threads(const Config& config, std::uint64_t gradient_bytes) {
  constexpr auto worth_it = std::uint64_t{8} << 20;
  return gradient_bytes < worth_it ? 1 : std::min(share_of_cores(config), session::max_parts);
}

Config config_of_rank(const Config& assigned, int rank) {
  auto config = assigned;
  const auto& devices = assigned.runners.devices;
  if (!devices.empty() && devices.at(static_cast<std::size_t>(rank)) == on_cpu)
    config.runners.device = Device::cpu;
  if (config.runners.device == Device::cuda) config.runners.protect_parameters = false;
  return config;
}

void set_environment_of_rank(const Config& assigned, int rank) {
  // cuBLAS reads this variable when its first handle is made, and is not deterministic without it.
  if (assigned.deterministic && config_of_rank(assigned, rank).runners.device == Device::cuda)
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*replace=*/0);
  const auto& devices = assigned.runners.devices;
  if (devices.empty()) return;
  const auto& device = devices.at(static_cast<std::size_t>(rank));
  setenv("CUDA_VISIBLE_DEVICES", device == on_cpu ? "" : device.c_str(), 1);
}

}  // namespace accelmgr::runner
