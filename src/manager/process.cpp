#include "manager/process.hpp"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/model.hpp"
#include "base/clock.hpp"
#include "base/log.hpp"
#include "config/loader.hpp"
#include "data/dealing.hpp"
#include "data/loader.hpp"
#include "ipc/launcher.hpp"
#include "ipc/process.hpp"
#include "ipc/socket.hpp"
#include "manager/supervisor.hpp"
#include "protocol/messages.hpp"
#include "runner/runner.hpp"
#include "session/session.hpp"
#include "tensor/generator.hpp"
#include "tensor/master.hpp"

namespace accelmgr::manager {
namespace {

session::Extent extent_of(const Config& config, session::Manifest& manifest, session::Element element) {
  const auto batch_size = static_cast<std::uint64_t>(config.batch_size_per_device);
  session::Extent extent;
  extent.ranks = config.nprocs;
  extent.element = element;
  extent.slab_element = config.gradients.slab_dtype == SlabDtype::bf16 ? session::SlabElement::bf16
                                                                       : session::SlabElement::same;
  extent.elements = manifest.place_tensors(element);
  extent.tensors = manifest.tensors.size();
  extent.buffer_bytes = manifest.place_buffers();
  extent.slots = static_cast<std::uint64_t>(
      data::batch_slots(config.grad_accumulation_steps, config.prefetch, config.batch_size_per_device));
  extent.slot_bytes = manifest.place_fields(batch_size);
  extent.manifest_bytes = session::manifest_bytes(manifest);
  return extent;
}

/// A session that holds the initial model, and its description.
session::Session make_session(const Config& config, std::unique_ptr<Model> model, const BatchSource& source,
                              session::Manifest& manifest) {
  auto tensors = tensor::describe(model->parameters(), model->buffers());
  manifest = tensors.manifest;
  manifest.fields = data::field_entries(source.fields());
  const auto extent = extent_of(config, manifest, tensors.element);
  session::Header plan{};
  session::plan_layout(extent, plan);
  session::check_memory(session::session_bytes(plan, config.nprocs),
                        static_cast<std::uint64_t>(config.memory.limit_bytes));

  auto session =
      session::Session::create(extent, config.nprocs, static_cast<int>(std::thread::hardware_concurrency()));
  session::write_manifest(manifest, session.manifest());
  for (std::size_t i = 0; i < tensors.parameters.size(); ++i)
    tensor::master_view(session.parameters(), tensors.element, manifest.tensors[i])
        .copy_(tensors.parameters[i].tensor.detach());
  for (int rank = 0; rank < config.nprocs; ++rank)
    tensor::store_buffers(tensors, manifest, session.buffers(0, rank));
  tensor::store_buffers(tensors, manifest, session.result_buffers(0));
  session.control().team.store(session::all_ranks(config.nprocs));
  session.publish();
  return session;
}

/// The host made the socket, so the socket tells who it is; its pid alone could be another's by now.
base::UniqueFd pidfd_of_host(int socket) {
  ucred host{};
  socklen_t size = sizeof host;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &host, &size) != 0)
    throw SystemError("asking the socket for the host's pid", errno);
  auto pidfd = ipc::open_pidfd(host.pid);
  if (getppid() != host.pid) throw SessionError("the host ended before the manager began");
  return pidfd;
}

}  // namespace

void run(base::UniqueFd socket) {
  int code = 1;
  try {
    ipc::name_process("accelmgr:mgr");
    base::start_logging("manager");
    const auto host_pidfd = pidfd_of_host(socket.get());
    const auto config =
        config::from_yaml(protocol::receive_configuration(socket.get(), base::Deadline::in_seconds(30)));
    // From here on the runners can be forked: nothing of torch has run, and there is no second thread.
    const int host_socket[] = {socket.get()};
    auto launcher = ipc::LauncherClient::start(
        [&](ipc::SpawnRequest request) { return runner::run(config, std::move(request)); }, host_socket);
    at::set_num_threads(1);
    session::Manifest manifest;
    tensor::seed_generator(config.seed_base);
    auto model = make_model(config);
    auto source = make_data(config);
    auto session = make_session(config, std::move(model), *source, manifest);
    data::Loader loader(std::move(source), session, manifest, config.batch_size_per_device,
                        config.data.drop_last);
    std::thread([&loader] {
      loader.run();
    }).detach();  // It may sit in a source for ever; the process's end ends it.
    Supervisor supervisor(config, session, manifest, launcher, socket.get(), host_pidfd.get());
    supervisor.start_runners();
    supervisor.run();
    code = 0;
  } catch (const std::exception& error) {
    try {
      protocol::send_failed(socket.get(), error);
    } catch (const Error&) {
      base::log().error("{}", error.what());  // The host is gone.
    }
  }
  _exit(code);  // The launcher sees its socket end, and ends what is left of the runners.
}

}  // namespace accelmgr::manager
