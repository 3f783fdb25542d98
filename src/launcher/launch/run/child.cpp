#include "launcher/launch/run/child.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/close_range.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <utility>

#include "base/ipc/process.hpp"
#include "base/ipc/roles.hpp"
#include "base/ipc/system_calls.hpp"
#include "base/ipc/zygote.hpp"
#include "base/log.hpp"
#include "base/parse_number.hpp"
#include "base/timing.hpp"
#include "launcher/launch/compat/variables.hpp"
#include "launcher/launch/plan/environment_scope.hpp"
#include "launcher/launch/run/child_messages.hpp"
#include "launcher/launch/run/detached_contexts.hpp"
#include "launcher/launch/run/failure.hpp"
#include "launcher/launch/run/registered_functions.hpp"

namespace accelmgr::launch {
namespace {

constexpr int exit_not_found = 127;  ///< The exit codes of shells: program not found, and not executable.
constexpr int exit_not_executed = 126;

ExitFunction exit_function = nullptr;

const char* device_name() noexcept {
  const char* name = std::getenv(variable::mp_device);
  return name != nullptr ? name : "CPU";
}

base::UniqueFd move_above(base::UniqueFd fd, int last) {
  if (fd.get() > last) return fd;
  base::UniqueFd above(fcntl(fd.get(), F_DUPFD_CLOEXEC, last + 1));
  if (!above) throw SystemError(fmt::format("duplicating descriptor {}", fd.get()), errno);
  return above;
}

/// Gives each descriptor after the first, which is the socket, its number. If the child executes a program,
/// all others above 2 are closed on exec.
void place(std::vector<base::UniqueFd>& descriptors, const std::vector<int>& targets, bool executes) {
  if (targets.size() + 1 != descriptors.size())
    throw SessionError(
        fmt::format("expected {} descriptors, got {}", targets.size() + 1, descriptors.size()));
  int last = STDERR_FILENO;
  for (const int target : targets) last = std::max(last, target);
  for (auto& fd : descriptors) fd = move_above(std::move(fd), last);
  if (executes) ipc::close_descriptors(STDERR_FILENO + 1, ~0U, CLOSE_RANGE_CLOEXEC);
  for (std::size_t i = 0; i < targets.size(); ++i)
    if (dup2(descriptors[i + 1].get(), targets[i]) < 0)
      throw SystemError(fmt::format("giving a descriptor the number {}", targets[i]), errno);
  descriptors.resize(1);
}

void report(int socket, const Report& report, const std::string& what) {
  TextMessage(encode(report), what).send(socket);
}

void report_failure(int socket, Failure failure) noexcept {
  try {
    report(socket, {.result = {}, .failure = std::move(failure)}, "a failure");
  } catch (const std::exception&) {
    // The launching process is gone.
  }
}

/// _exit: the functions registered with atexit() belong to the parent.
[[noreturn]] void end(int rank, int code) noexcept {
  if (exit_function != nullptr) exit_function(rank, code);
  join_detached_contexts();
  std::cout.flush();
  std::fflush(stdout);
  std::fflush(stderr);
  _exit(code);
}

/// Makes the calls that `prepare` returns, and reports the result. A failure names one of three phases:
/// "start" (prepare), "setup" and "function".
template <class Prepare>
[[noreturn]] void run_function(int socket, int rank, Prepare prepare) noexcept {
  std::string phase = "start";
  int code = 0;
  try {
    base::start_logging(fmt::format("rank {}", rank));
    const Calls& calls = prepare();
    phase = "setup";
    if (calls.setup) calls.setup(rank);
    phase = "function";
    auto result = std::make_optional(calls.function(rank));  // JSON converts itself to an optional, too.
    report(socket, {.result = std::move(result), .failure = {}}, fmt::format("the result of rank {}", rank));
  } catch (...) {
    auto failure = failure_of(std::current_exception(), rank, phase);
    code = failure.exit_code;
    print_failure(failure, device_name());
    write_error_file(failure);
    report_failure(socket, std::move(failure));
  }
  end(rank, code);
}

[[noreturn]] void make_call(int socket, int rank) noexcept {
  run_function(socket, rank, [&] {
    const auto text = receive_text_message(socket, base::Deadline::in_seconds(timing::first_words_s));
    if (!text)
      throw SessionError("the process that launched this one ended before it said which function to call");
    const auto call = std::make_shared<const Call>(decode_call(*text));
    Calls calls;
    if (!call->setup.empty())
      calls.setup = [call, &setup = registered_function(call->setup)](int own) { setup(own, call->args); };
    calls.function = [call, &function = registered_function(call->function)](int own) {
      return function(own, call->args);
    };
    return calls;
  });
}

[[noreturn]] void execute_program(int socket, const Order& order) noexcept {
  std::vector<char*> argv;
  for (const auto& arg : order.program) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  const int error = errno;
  try {
    throw SystemError(fmt::format("executing {}", order.program[0]), error);
  } catch (const SystemError&) {
    auto failure = failure_of(std::current_exception(), order.rank, "start");
    ipc::set_exit(failure, W_EXITCODE(error == ENOENT ? exit_not_found : exit_not_executed, 0));
    report_failure(socket, failure);
    _exit(failure.exit_code);
  }
}

void execute_self(int socket, const Order& order) {
  auto command = ipc::self_command();
  const auto program = command.program;
  command.arguments.insert(command.arguments.end(),
                           {child_argument, std::to_string(socket), std::to_string(order.rank)});
  std::vector<char*> argv;
  for (auto& argument : command.arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  fcntl(socket, F_SETFD, 0);
  execv(program.c_str(), argv.data());
  throw SystemError(fmt::format("executing {}", command.arguments.front()), errno);
}

/// Receives the order, and gives this process its name, environment and descriptors. Does not return if that
/// fails, or if the order is to execute this program again.
Order take_order(std::vector<base::UniqueFd>& descriptors) noexcept {
  Order order;
  try {
    const auto text =
        receive_text_message(descriptors.front().get(), base::Deadline::in_seconds(timing::first_words_s));
    if (!text) _exit(ipc::exit_uncaught);
    order = decode_order(*text);
    ipc::name_process(fmt::format("accelmgr:rank{}", order.rank).c_str());
    replace_environment(order.environment);
    place(descriptors, order.targets, order.execute_self || !order.program.empty());
    if (order.execute_self) execute_self(descriptors.front().get(), order);
  } catch (const std::exception&) {
    auto failure = failure_of(std::current_exception(), order.rank, "start");
    print_failure(failure, device_name());
    report_failure(descriptors.front().get(), std::move(failure));
    _exit(ipc::exit_uncaught);
  }
  return order;
}

}  // namespace

void set_exit_function(ExitFunction function) noexcept { exit_function = function; }

void run_child(ipc::SpawnRequest request, const Calls& calls) noexcept {
  if (request.fds.empty()) _exit(ipc::exit_uncaught);  // There is no socket to report to.
  const auto order = take_order(request.fds);
  const int socket = request.fds.front().release();  // Stays open until the process ends.
  if (!order.program.empty()) execute_program(socket, order);
  if (order.call) make_call(socket, order.rank);
  run_function(socket, order.rank, [&]() -> const Calls& { return calls; });
}

namespace {

/// Runs the fork server whose children call run_child().
[[noreturn]] void become_fork_server(base::UniqueFd socket, const base::UniqueFd& creator) noexcept {
  const ipc::ChildMain child_main = [](ipc::SpawnRequest request) -> int {
    run_child(std::move(request), {});
  };
  ipc::become_fork_server_beside_threads(std::move(socket), child_main, fork_server_options(creator.get()));
}

const ipc::RegisteredForkedRole forked_server(fork_server_role, become_fork_server);

const ipc::RegisteredRole executed_server(fork_server_argument,
                                          [](std::span<const std::string_view> arguments) {
                                            if (!arguments.empty()) return;
                                            ipc::keep_role_descriptors();
                                            become_fork_server(base::UniqueFd(ipc::role_socket),
                                                               base::UniqueFd(ipc::role_creator));
                                          });

const ipc::RegisteredRole executed_child(child_argument, [](std::span<const std::string_view> arguments) {
  if (arguments.size() != 2) return;
  const auto socket = base::parse_number<int>(arguments[0]), rank = base::parse_number<int>(arguments[1]);
  if (!socket || !rank) return;
  fcntl(*socket, F_SETFD, FD_CLOEXEC);
  ipc::name_process(fmt::format("accelmgr:rank{}", *rank).c_str());
  make_call(*socket, *rank);
});

}  // namespace
}  // namespace accelmgr::launch
