#include "engine/service/actions.hpp"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"
#include "base/exception_text.hpp"
#include "base/ipc/memory.hpp"
#include "engine/protocol/messages.hpp"
#include "engine/service/query.hpp"
#include "engine/service/status.hpp"

namespace accelmgr::service {
namespace {

using manager::Lease;
using nlohmann::json;

constexpr double checkpoint_s = 60;  // For a host to look at the request for a checkpoint, and to write it.
constexpr std::size_t longest_name = 64;
constexpr int most_awaited = 1000;  ///< Steps whose results fit in one answer.

/// Whether the process that asks has the lease.
bool is_host(Service& service, const Request& request) {
  const auto& lease = service.manager().lease();
  return request.peer && lease.state() == Lease::State::driven && lease.host().pid == request.peer->pid;
}

/// Throws Problem if the service itself drives the session.
void check_idle(Service& service) {
  if (service.pending_steps().are_under_way())
    throw Problem(409, "steps_under_way", service.pending_steps().text(),
                  {.hint = "try again when they are over, or end them: POST /v1/cancel, accelmgr cancel"});
  if (service.driver().is_busy())
    throw Problem(409, "service_drives", "the service makes steps for another request",
                  {.hint = "try again when they are done"});
}

/// Throws Problem if runners are not ready, or a host has the lease.
void check_free(Service& service) {
  check_ready(service);
  const auto& lease = service.manager().lease();
  const auto& host = lease.host();
  if (lease.state() == Lease::State::driven)
    throw Problem(409, "host_drives", fmt::format("{} (pid {}) drives the session", host.name, host.pid),
                  {.hint = "one host at a time drives a session; it must detach or end first"});
  if (lease.state() == Lease::State::leaving)
    throw Problem(409, "host_is_ending", fmt::format("{} (pid {}) is ending", host.name, host.pid),
                  {.hint = "try again when its process has ended"});
}

/// Throws Problem unless the service itself may drive. It may not while a host's write is half done.
void check_free_for_service(Service& service) {
  check_idle(service);
  check_free(service);
  if (const auto& unfinished = service.manager().lease().unfinished(); !unfinished.empty())
    throw Problem(409, "unfinished", unfinished,
                  {.hint = "attach a host that writes the parameters, or start again from a checkpoint"});
}

/// Throws Problem unless the process that asks can share memory with the service. `kind`: what it wants to
/// be.
void check_can_share(const Request& request, const std::string& kind, const std::string& calls) {
  if (request.header_field("upgrade") != "accelmgr-" + kind)
    throw Problem(426, "upgrade_required", fmt::format("the request does not say Upgrade: accelmgr-{}", kind),
                  {.hint = "use " + calls});
  const auto build = fmt::format("{:016x}", protocol::build_fingerprint());
  if (request.header_field("accelmgr-build") != build)
    throw Problem(409, "foreign_build",
                  fmt::format("this {} is of build '{}', the service of build '{}'", kind,
                              request.header_field("accelmgr-build"), build),
                  {.hint = "use the same build of accelmgr for both"});
  if (!request.peer)
    throw Problem(409, "no_unix_socket",
                  "the service shares its memory with whoever attaches, which no TCP connection carries",
                  {.hint = "attach over the Unix socket of the service"});
}

/// The Problem that tells the client of the exception `thrown`.
Problem problem_of_exception(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Problem& problem) {
    return problem;
  } catch (const UsageError& error) {
    return {409, "usage", error.what()};
  } catch (...) {
    return {500, "internal", base::current_exception_text()};
  }
}

Problem problem_of(const StepResult& result) {
  const int status = result.status == StepStatus::timeout                                              ? 504
                     : result.status == StepStatus::data_end || result.status == StepStatus::nonfinite ? 409
                                                                                                       : 503;
  return {status,
          to_string(result.status),
          !result.error.empty() ? result.error
          : result.status == StepStatus::data_end
              ? "the data source has ended"
              : fmt::format("the step ended as {}", to_string(result.status)),
          {.rank = result.rank, .step = static_cast<std::int64_t>(result.step)}};
}

/// The update of the last inner step. Throws Problem if there was none.
std::optional<session::Update> last_update(const session::Session& session) {
  const auto& control = session.control();
  if (const auto asked = control.updates_asked.load(); asked != 0) {
    const auto& last = control.updates[asked % 2];
    if (last.moments() == control.moments_used.load())
      return last;  // Or a host has died while it wrote them.
  }
  throw Problem(409, "no_update", "no host has made an inner step with the optimizer's state that is there",
                {.hint = "attach a host, and let it step with its optimizer"});
}

}  // namespace

void check_ready(Service& service) {
  if (const auto not_ready = why_not_ready(service))
    throw Problem(503, not_ready->code, not_ready->why, {.hint = not_ready->hint});
}

void step(Service& service, const Request& request, const Respond& respond) {
  const bool waits = request.fields.value("wait", true);
  const bool for_host = !waits && is_host(service, request);
  StepsAsked asked{.count = request.fields.value("count", 1),
                   .options = {.accumulate = request.fields.value("accumulate", StepOptions().accumulate),
                               .parameters_changed = for_host},  // Nothing but a host writes parameters.
                   .timeout_s = request.fields.value("timeout_s", service.manager().config().step_timeout)};
  if (waits && asked.count > most_awaited)
    throw Problem(
        400, "bad_request",
        fmt::format("count is {}; it must be 1 to {} in a request that waits", asked.count, most_awaited),
        {.hint = "send \"wait\": false, and ask GET /v1/pending"});
  if (for_host) {
    check_ready(service);
    check_idle(service);
  } else {
    check_free_for_service(service);
  }
  if (request.fields.value("update", false)) asked.update = last_update(service.manager().session());
  if (!waits) {
    service.pending_steps().begin(asked, request.peer ? fmt::format("process {}", request.peer->pid)
                                                      : std::string("a client of --http"));
    return respond(json_response({{"steps", json::array()}, {"pending", asked.count}}));
  }
  const auto results = std::make_shared<std::vector<StepResult>>();
  service.driver().run(
      [=](Drive& drive) {
        make_steps(asked, drive, [&](StepResult result) {
          results->push_back(std::move(result));
          return drive.session.control().closing.load() == 0;
        });
      },
      [=](const std::exception_ptr& thrown) {
        if (thrown) return respond(problem_of_exception(thrown).response());
        if (!results->back()) return respond(problem_of(results->back()).response());
        json steps = json::array();
        for (const auto& result : *results) steps.push_back(result_of(result));
        respond(json_response({{"steps", steps}}));
      });
}

void cancel(Service& service, const Request&, const Respond& respond) {
  service.pending_steps().cancel(
      [=, &service] { respond(json_response(service.pending_steps().since(PendingSteps::most))); });
}

void zero_grad(Service& service, const Request&, const Respond& respond) {
  check_free_for_service(service);
  service.driver().run(
      [](Drive& drive) { drive.stepper.zero_gradients(); },
      [=](const std::exception_ptr& thrown) {
        respond(thrown ? problem_of_exception(thrown).response() : json_response({{"zeroed", true}}));
      });
}

void resize(Service& service, const Request& request, const Respond& respond) {
  const auto runners = request.fields.at("runners").get<int>();
  if (const int most = service.manager().session().ranks(); runners > most)
    throw Problem(400, "bad_request",
                  fmt::format("runners is {}; the session has room for 1 to {}", runners, most),
                  {.hint = "runners.max_runners says for how many"});
  check_ready(service);
  if (const auto answer = service.manager().supervisor().resize(runners); !answer.refused.empty())
    throw Problem(409, "refused", answer.refused, {.hint = "nothing has changed"});
  respond(json_response({{"runners", runners_of(service)}}));
}

void restart(Service& service, const Request& request, const Respond& respond) {
  const auto number = static_cast<int>(number_in(request, "rank", 0));
  check_ready(service);
  try {
    service.manager().supervisor().replace(number);
  } catch (const SessionError& error) {
    throw Problem(409, "refused", error.what(), {.rank = number});
  }
  respond(json_response({{"runners", runners_of(service)}}));
}

/// A host that drives the session writes the checkpoint, with its optimizer.
void checkpoint(Service& service, const Request& request, const Respond& respond) {
  const double timeout_s = request.fields.value("timeout_s", checkpoint_s);
  if (service.manager().config().checkpoint.directory.empty())
    throw Problem(409, "no_directory", "the service has no folder for checkpoints",
                  {.hint = "start it with checkpoint.directory"});
  const auto until = base::Deadline::in_seconds(timeout_s);
  if (service.manager().lease().state() == Lease::State::driven && !service.driver().is_busy())
    return service.host_checkpoints().ask(respond, until);
  check_free_for_service(service);
  const auto written = std::make_shared<std::vector<CheckpointWritten>>();
  service.driver().run(
      [=](Drive& drive) {
        drive.save();
        *written = drive.checkpoints.written(until);
      },
      [=](const std::exception_ptr& thrown) {
        if (thrown) return respond(problem_of_exception(thrown).response());
        if (written->empty())
          return respond(Problem(504, "timeout",
                                 fmt::format("the checkpoint was not written within {} s", timeout_s),
                                 {.hint = "it may be written later"})
                             .response());
        respond(response_to(written->back()));
      });
}

void stop(Service& service, const Request& request, const Respond& respond) {
  service.close(request.peer ? fmt::format("process {} asked for it", request.peer->pid)
                             : std::string("a client of --http asked for it"));
  respond(json_response({{"stopping", true}}, 202));
}

/// Gives the lease to the process that asks, with the socket on which it finds the session.
void attach(Service& service, const Request& request, const Respond& respond) {
  check_can_share(request, "host", "Manager::attach() or accelmgr.attach()");
  service.manager().lease().asks_again(request.peer->pid);
  if (!service.pending_steps().are_under_way()) check_idle(service);
  check_free(service);
  const auto name = request.header_field("accelmgr-host").substr(0, longest_name);
  auto& lease = service.manager().lease();
  protocol::Opening opening{.configuration = config::to_yaml(service.manager().config()),
                            .run_id = service.run_id(),
                            .pending_steps = service.pending_steps().count(lease.steps())};
  if (const auto last = service.manager().last_checkpoint()) {
    opening.checkpoint = last->path;
    opening.state = base::duplicate(last->state.get());
    opening.training = base::duplicate(last->training.get());
  }
  auto socket = lease.admit({.name = name.empty() ? "a host" : name,
                             .pid = request.peer->pid,
                             .pidfd = base::duplicate(request.peer->pidfd.get())},
                            std::move(opening));
  service.tell_clients([&events = service.events()] { events.look(); });  // Before the host can make a step.
  respond({.status = 101,
           .header = {{"Upgrade", "accelmgr-host"}},
           .fd = std::make_shared<const base::UniqueFd>(std::move(socket)),
           .undelivered = [&service, &lease, number = lease.number()] {
             service.act([&lease, number] { lease.take_back(number); });
           }});
}

void observe(Service& service, const Request& request, const Respond& respond) {
  check_can_share(request, "observer", "Observer::attach() or accelmgr.observe()");
  auto memory = ipc::open_read_only(service.manager().session().fds().front());
  respond({.status = 101,
           .header = {{"Upgrade", "accelmgr-observer"}},
           .fd = std::make_shared<const base::UniqueFd>(std::move(memory))});
}

}  // namespace accelmgr::service
