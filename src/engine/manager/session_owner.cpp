#include "engine/manager/session_owner.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "accelmgr/errors.hpp"
#include "base/exception_text.hpp"
#include "base/ipc/cores.hpp"
#include "base/log.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/session_state.hpp"
#include "engine/data/sharding.hpp"
#include "engine/replica/model.hpp"

namespace accelmgr::manager {
namespace {

session::Extent extent_of(const Config& config, session::Manifest& manifest) {
  const auto batch_size = static_cast<std::uint64_t>(config.batch_size_per_device);
  session::Extent extent;
  extent.ranks = std::max(config.nprocs, config.runners.max_runners);
  extent.bytes = manifest.place_tensors();
  extent.tensors = manifest.tensors.size();
  extent.has_snapshot = config.parameters.snapshot;
  extent.buffer_bytes = manifest.place_buffers();
  const auto most = config.runners.share == Share::even
                        ? config.grad_accumulation_steps
                        : data::largest_share(extent.ranks, config.grad_accumulation_steps);
  extent.keeps_last_step = config.data.keep_last_step;
  extent.slots =
      data::batch_slots(most, config.prefetch, config.batch_size_per_device, extent.keeps_last_step);
  extent.slot_bytes = manifest.place_fields(batch_size);
  extent.batch_size = batch_size;
  extent.manifest_bytes = session::manifest_bytes(manifest);
  return extent;
}

/// How errors of the user's data source begin.
std::string name_of_source(const Config& config) { return fmt::format("data source '{}'", config.data.kind); }

}  // namespace

// The model is made before the data source: if there is no such model, the error of make_replica() says best
// what was meant. Slabs get their memory last: by then the host has released the model from which the
// parameters came.
SessionOwner SessionOwner::make(const Config& config, const Prepared& prepared) {
  const auto replica = replica::make_replica(config, replica::Role::description());
  auto source = make_data(config);
  const auto model = base::in_user_code<ModelError>(fmt::format("model '{}'", config.model.kind),
                                                    [&] { return replica::tensors_of(replica->describe()); });
  auto manifest = model.manifest;
  manifest.fields = base::in_user_code<DataError>(name_of_source(config),
                                                  [&] { return data::field_entries(source->fields()); });
  manifest.set_precision({.bf16_runners = config.runners.parameters == RunnerParameters::bf16,
                          .bf16_slabs = config.gradients.slab_dtype == SlabDtype::bf16,
                          .float32_gradients = config.gradients.dtype == GradientDtype::float32});
  const auto extent = extent_of(config, manifest);
  session::Header plan{};
  session::plan_layout(extent, plan);
  const auto bytes = session::session_bytes(plan, config.nprocs);
  // What the host has, it gives up tensor by tensor while it writes the parameters.
  const auto moved = model.has_values ? 0 : plan.bytes.parameters;
  session::check_memory(bytes, static_cast<std::uint64_t>(config.memory.limit_bytes), bytes - moved);

  const int threads = ipc::allowed_cores();
  auto session = session::Session::create(extent, 0, threads,
                                          model.has_values ? ipc::Allocate::now : ipc::Allocate::later);
  session::write_manifest(manifest, session.manifest());
  replica::store_initial(model, session, manifest);
  const auto team = session::all_ranks(config.nprocs);
  session.control().team.store(team);
  session.control().assignment = {
      team, session::even_shares(static_cast<std::uint32_t>(config.grad_accumulation_steps))};
  session.control().assignments.store(1);
  if (!config.checkpoint.resume.empty())
    checkpoint::restore(checkpoint::open(config.checkpoint.resume), session, manifest);
  session.publish();
  base::log().info("the session has {:.1f} MiB: model '{}' of {} tensors, data source '{}'",
                   double(session.used_bytes(config.nprocs)) / (1 << 20), config.model.kind,
                   manifest.tensors.size(), config.data.kind);
  prepared(session, !model.has_values && config.checkpoint.resume.empty());
  replica->read_parameters(manifest, replica::places_of(session.parameters(), manifest));
  for (int rank = 0; rank < config.nprocs; ++rank) session.allocate_slab(rank, threads);
  return {std::move(session), std::move(manifest), std::move(source)};
}

SessionOwner SessionOwner::take_over(const Config& config, std::vector<base::UniqueFd> fds) {
  auto session = session::Session::attach(std::move(fds));
  session::SupervisorView(session).take_over();
  base::log().info("this manager takes the session over after {} steps",
                   std::uint64_t{session.counters(session.word().index).steps});
  auto manifest = session::read_manifest(session);
  return {std::move(session), std::move(manifest), make_data(config)};
}

const data::Loader& SessionOwner::start_loading(const Config& config, bool reads_again) {
  loader_ = base::in_user_code<DataError>(name_of_source(config), [&] {
    return std::make_unique<data::Loader>(std::move(source_), session::LoaderView(*session_), *manifest_,
                                          data::Loading{.batch_size = config.batch_size_per_device,
                                                        .prefetch = config.prefetch,
                                                        .with_step = config.prefetch == 0,
                                                        .drop_last = config.data.drop_last,
                                                        .reads_again = reads_again});
  });
  std::thread([loader = loader_.get()] { loader->run(); }).detach();
  return *loader_;
}

}  // namespace accelmgr::manager
