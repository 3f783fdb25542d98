#include "manager/process.hpp"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/model.hpp"
#include "base/clock.hpp"
#include "base/log.hpp"
#include "checkpoint/checkpoint.hpp"
#include "checkpoint/session_state.hpp"
#include "config/faults.hpp"
#include "config/loader.hpp"
#include "data/dealing.hpp"
#include "data/loader.hpp"
#include "ipc/launcher.hpp"
#include "ipc/process.hpp"
#include "ipc/socket.hpp"
#include "manager/checkpoint_writer.hpp"
#include "manager/embedding.hpp"
#include "manager/role.hpp"
#include "manager/supervisor.hpp"
#include "protocol/messages.hpp"
#include "runner/runner.hpp"
#include "session/session.hpp"
#include "tensor/exception_text.hpp"
#include "tensor/generator.hpp"
#include "tensor/master.hpp"

namespace accelmgr::manager {
namespace {

session::Extent extent_of(const Config& config, session::Manifest& manifest, session::Element element) {
  const auto batch_size = static_cast<std::uint64_t>(config.batch_size_per_device);
  session::Extent extent;
  extent.ranks = std::max(config.nprocs, config.runners.max_runners);
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

/// A session that holds the initial model, and its description. The model comes before the source that is
/// made to fit it: of a model that there is not, only the registry of models knows what was meant. Slabs have
/// no memory before the host has let go of what the parameters came from.
session::Session make_session(const Config& config, int socket, std::unique_ptr<BatchSource>& source,
                              session::Manifest& manifest) {
  tensor::seed_generator(config.seed_base);
  const auto model = make_model(config);
  source = make_data(config);
  const auto model_name = fmt::format("model '{}'", config.model.kind);
  auto tensors = tensor::in_user_code<ModelError>(model_name, [&] {
    return tensor::describe(model->parameters(), model->buffers(), model->non_persistent_buffers());
  });
  manifest = tensors.manifest;
  manifest.fields = tensor::in_user_code<DataError>(fmt::format("data source '{}'", config.data.kind),
                                                    [&] { return data::field_entries(source->fields()); });
  const auto extent = extent_of(config, manifest, tensors.element);
  session::Header plan{};
  session::plan_layout(extent, plan);
  session::check_memory(session::session_bytes(plan, config.nprocs),
                        static_cast<std::uint64_t>(config.memory.limit_bytes));

  const int threads = static_cast<int>(std::thread::hardware_concurrency());
  auto session = session::Session::create(extent, 0, threads);
  session::write_manifest(manifest, session.manifest());
  for (std::size_t i = 0; i < tensors.parameters.size(); ++i)
    tensor::parameter_view(session, manifest, i).copy_(tensors.parameters[i].tensor.detach());
  for (int rank = 0; rank < session.ranks(); ++rank)
    tensor::store_buffers(tensors, manifest, session.buffers(0, rank));
  tensor::store_buffers(tensors, manifest, session.result_buffers(0));
  const auto team = session::all_ranks(config.nprocs);
  session.control().team.store(team);
  session.control().deal_to.store(team);
  if (!config.checkpoint.resume.empty()) {
    checkpoint::restore(checkpoint::open(config.checkpoint.resume), session, manifest);
    tensor::scatter_shared_parameters(session, manifest);
  }
  session.publish();
  base::log().info("the session has {:.1f} MiB: model '{}' of {} tensors, data source '{}'",
                   double(session::session_bytes(session.header(), config.nprocs)) / (1 << 20),
                   config.model.kind, manifest.tensors.size(), config.data.kind);
  protocol::send_prepared(socket, session.fds(), base::Deadline::in_seconds(config.start_timeout));
  for (int rank = 0; rank < config.nprocs; ++rank) session.allocate_slab(rank, threads);
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

/// Of an earlier manager over the same session: what only that one knew is set back.
session::Session take_over_session(std::vector<base::UniqueFd> fds, session::Manifest& manifest) {
  auto session = session::Session::attach(std::move(fds));
  manifest = session::read_manifest(session.manifest());
  auto& control = session.control();
  control.given_up.store(0);
  control.stopping.store(0);
  control.managers.fetch_add(1);
  for (int rank = 0; rank < session.ranks(); ++rank) {
    session.record(rank).life.store(session::Life::absent);
    session.record(rank).pid.store(0);
  }
  return session;
}

/// A launcher by exec: forking one from here would copy this process's threads' locks.
ipc::LauncherClient execute_launcher(const Config& config, int host_pidfd) {
  auto [ours, theirs] = ipc::socket_pair();
  const std::pair<int, int> inherited[] = {{theirs.get(), role_socket}, {host_pidfd, role_host}};
  auto process = ipc::execute_self({launcher_argument}, inherited);
  theirs.reset();
  protocol::send_configuration(ours.get(), config::to_yaml(config));
  return {std::move(ours), std::move(process)};
}

/// The manager's group holds what user code forks there: workers of a data loader, for instance.
ipc::LauncherOptions launcher_options(int creator, pid_t manager, int host_pidfd) {
  return {.creator = creator, .creator_group = getpgid(manager) == manager ? manager : 0, .host = host_pidfd};
}

ipc::ChildMain runner_main(const Config& config) {
  return [&config](ipc::SpawnRequest request) {
    embedding().runner_began();
    return runner::run(config, std::move(request));
  };
}

/// With what user code has forked here.
[[noreturn]] void leave(int code) {
  constexpr double term_s = 0.3;
  if (getpgrp() == getpid()) ipc::end_group_members(getpid(), base::Deadline::in_seconds(term_s));
  _exit(code);
}

/// Told to the host, or to nobody: then it is gone. The launcher sees its socket end, and ends what is left
/// of the runners.
[[noreturn]] void fail(int socket, const Error& error) {
  try {
    protocol::send_failed(socket, error);
  } catch (const Error&) {
    base::log().error("{}", error.what());
  }
  leave(1);
}

/// In a handler: with what was thrown, which may be the user's.
[[noreturn]] void fail(int socket) {
  try {
    throw;
  } catch (const Error& error) {
    fail(socket, error);
  } catch (...) {
    fail(socket, Error(tensor::current_exception_text()));
  }
}

/// Ends the process, while all that its threads look at is there. Throws before it has threads of its own.
[[noreturn]] void supervise(const Config& config, const session::Session& session,
                            const session::Manifest& manifest, ipc::LauncherClient launcher,
                            const data::Loader& loader, int socket, int host_pidfd) {
  Supervisor* told = nullptr;
  CheckpointWriter writer(config.checkpoint,
                          [&](protocol::Saved saved) { told->tell_host(std::move(saved)); });
  Supervisor supervisor(
      config, session, manifest, std::move(launcher), [&] { return execute_launcher(config, host_pidfd); },
      [&](protocol::Save save) { writer.write(std::move(save)); }, [&] { return loader.reading(); }, socket,
      host_pidfd);
  told = &supervisor;
  try {
    supervisor.run();
  } catch (...) {
    fail(socket);
  }
  // How long a stop may take is the host's business; without one, a disk that hangs keeps nobody.
  while (!writer.finish(base::Deadline::in_seconds(0.2)) && !supervisor.host_gone()) {
  }
  leave(0);
}

[[noreturn]] void serve_host(int socket, base::UniqueFd host_pidfd) {
  base::start_logging("manager");
  if (!host_pidfd) host_pidfd = pidfd_of_host(socket);
  const auto patience = base::Deadline::in_seconds(30);
  const auto config = config::from_yaml(protocol::receive_configuration(socket, patience));
  auto offered = protocol::receive_begin(socket, patience);
  // From here on the runners can be forked: nothing of torch has run, and there is no second thread.
  const int host_socket[] = {socket};
  const auto child_main = runner_main(config);
  auto launcher =
      ipc::LauncherClient::start(child_main, launcher_options(-1, getpid(), host_pidfd.get()), host_socket);
  base::log().info("the manager (pid {}) begins; its launcher is process {}", getpid(), launcher.pid());
  embedding().manager_began();
  at::set_num_threads(1);
  session::Manifest manifest;
  std::unique_ptr<BatchSource> source;
  auto session = offered.empty() ? make_session(config, socket, source, manifest)
                                 : take_over_session(std::move(offered), manifest);
  if (!source)
    base::log().info("this manager takes the session over after {} steps",
                     session.counters(session.word().index).steps);
  session.keep_from_children();
  config::arm_faults(config, -1, session.control().managers.load());
  if (!source) source = make_data(config);
  auto loader = tensor::in_user_code<DataError>(fmt::format("data source '{}'", config.data.kind), [&] {
    return data::Loader(std::move(source), session, manifest, config.batch_size_per_device,
                        config.data.drop_last, session.control().deal_to.load());
  });
  std::thread([&loader] {
    loader.run();
  }).detach();  // It may sit in a source for ever; the process's end ends it.
  try {
    supervise(config, session, manifest, std::move(launcher), loader, socket, host_pidfd.get());
  } catch (...) {
    fail(socket);
  }
}

}  // namespace

void run(base::UniqueFd socket, base::UniqueFd host_pidfd) {
  try {
    ipc::name_process("accelmgr:mgr");
    ipc::survive_failed_writes();
    serve_host(socket.get(), std::move(host_pidfd));
  } catch (...) {
    fail(socket.get());
  }
}

void run_launcher(base::UniqueFd socket) {
  int code = 1;
  try {
    ipc::name_process("accelmgr:launch");
    ipc::survive_failed_writes();
    ucred manager{};
    socklen_t size = sizeof manager;
    if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &manager, &size) != 0)
      throw SystemError("asking the socket for the manager's pid", errno);
    const auto manager_pidfd = ipc::open_pidfd(manager.pid);
    if (getppid() != manager.pid) throw SessionError("the manager ended before the launcher began");
    const base::UniqueFd host_pidfd(role_host);
    base::start_logging("launcher");
    const auto config =
        config::from_yaml(protocol::receive_configuration(socket.get(), base::Deadline::in_seconds(30)));
    const auto child_main = runner_main(config);
    code = ipc::run_launcher(std::move(socket), child_main,
                             launcher_options(manager_pidfd.get(), manager.pid, host_pidfd.get()));
  } catch (const std::exception& error) {
    base::log().error("the launcher could not begin: {}", error.what());
  }
  _exit(code);
}

}  // namespace accelmgr::manager
