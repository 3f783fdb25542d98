// Intervals and bounds of waits of the processes of a session, a launch or a world, in one place because most
// depend on others. A bound on which no other depends may stand where it is waited, as those of the agent do
// (launcher/agent). Those that a user may set are in the configuration instead.
#pragma once

#include <cstdint>

namespace accelmgr::timing {

constexpr double seconds(std::int64_t ns) { return double(ns) / 1e9; }

// Intervals at which a wait looks around.

/// A wait looks at the processes that it waits for, and asks whether it is interrupted.
inline constexpr std::int64_t look_ns = 20'000'000;
inline constexpr double look_s = seconds(look_ns);
/// The first pauses of a wait that polls what no descriptor and no futex reports.
inline constexpr std::int64_t short_look_ns = 1'000'000;
/// A client polls a store.
inline constexpr std::int64_t store_look_ns = 200'000'000;
/// A wait for other machines asks whether it is interrupted.
inline constexpr std::int64_t mesh_look_ns = 10'000'000;
/// A wait that a signal handler of Python can end looks for signals.
inline constexpr double signal_look_s = 0.05;
/// The supervisor looks at all runners.
inline constexpr std::int64_t supervisor_look_ns = 50'000'000;
/// If two looks of the supervisor are further apart, it was suspended, or starved like other processes.
inline constexpr std::int64_t supervisor_gap_ns = 10 * supervisor_look_ns;
/// A StallTimer counts at most this between two looks, because this process may have been stopped.
inline constexpr std::int64_t stall_look_ns = 200'000'000;
/// Until the fork server tries again to send a report for which memory was lacking.
inline constexpr int report_again_ms = 50;
/// Until the next attempt to connect to a machine that did not answer.
inline constexpr double connect_again_s = 0.05;
/// How long a rank that has a core for itself spins.
inline constexpr int spin_when_alone_us = 500;

static_assert(short_look_ns < look_ns && look_s < seconds(supervisor_gap_ns));
static_assert(stall_look_ns > supervisor_look_ns && stall_look_ns > look_ns);

// A step.

/// The host finishes a committed attempt itself if no slice has moved for this much longer than
/// runners.reduction_timeout. That happens only if the supervisor is stuck: otherwise it has ended the stuck
/// runners.
inline constexpr double reduction_by_host_margin_s = 3.0;
/// A read of the data source that takes longer is logged.
inline constexpr double source_patience_s = 5.0;
/// The longest delay before a restart.
inline constexpr double longest_backoff_s = 30;

static_assert(reduction_by_host_margin_s > 2 * seconds(supervisor_gap_ns));

// Ends, from inner to outer processes: a process that ends others waits longer than they need to end.

/// Processes that user code has forked in the manager's process group get TERM, and KILL after this.
inline constexpr double group_end_s = 0.3;
/// A fork server that has killed its processes ends within this.
inline constexpr double fork_server_end_s = 1.0;
/// The fork server reports how a process ended within this, even if it gets no processor for a while. Later
/// the process counts as ended in an unknown way.
inline constexpr double end_report_s = 3.0;
/// The creator of a fork server ends by itself within this, once its host or its socket is gone.
inline constexpr double creator_ends_s = 1.0;
/// The fork server waits for the end of processes that it has killed.
inline constexpr double fork_server_kill_s = 2.0;
/// The supervisor waits for runners to finish what they compute, and then as long for the fork server, which
/// kills those that have not.
inline constexpr double runners_stop_s = 2.0;
/// The supervisor waits for runners when the host is gone: no process needs what they compute.
inline constexpr double host_gone_s = 0.2;
/// A manager that is asked to stop and still writes a checkpoint looks whether its host is gone.
inline constexpr double writer_look_s = 0.2;
/// A process that has not ended this long after SIGKILL is stuck in the kernel.
inline constexpr double sits_in_kernel_s = 10.0;
/// The host waits for the manager: more than the manager takes to end its runners by force.
inline constexpr double manager_stop_s = 6.0;
/// The host waits for the exit status of a manager that the zygote has reaped.
inline constexpr double manager_status_s = 5.0;
/// A manager that was killed just now ends within this. recover() waits for it.
inline constexpr double killed_manager_ends_s = 5.0;
/// The manager of a killed run, which may still write a checkpoint, ends within this.
inline constexpr double last_writer_ends_s = 10.0;
/// A single process ends within this after KILL, even on a busy machine.
inline constexpr double killed_child_ends_s = 3.0;

/// Work that a device still does when a process gives its memory back ends within this. Otherwise the device
/// hangs, and the process ends without waiting for it.
inline constexpr double device_settles_s = 5.0;

/// An abort of a team of devices ends within this. Otherwise its runner ends: NCCL may still write to memory
/// that would be given back.
inline constexpr double team_aborts_s = 5.0;

/// The devices of a team find each other within this. NCCL takes seconds for many GPUs.
inline constexpr double team_joins_s = 60;

static_assert(group_end_s < fork_server_kill_s);
static_assert(creator_ends_s + group_end_s < fork_server_kill_s);
static_assert(host_gone_s < runners_stop_s);
static_assert(runners_stop_s + fork_server_kill_s < manager_stop_s);
static_assert(fork_server_end_s < runners_stop_s);
static_assert(manager_stop_s < sits_in_kernel_s);
static_assert(killed_manager_ends_s < manager_stop_s && killed_manager_ends_s < last_writer_ends_s);

// Beginnings and messages.

/// For the first message that a new process or its creator gets: it was sent before, or follows at once.
inline constexpr double first_words_s = 30;
/// For a service to answer a request for which it need not wait.
inline constexpr double service_answer_s = 30;
/// For a fork of the host to begin, and for the forks made in its place. A fork that does not begin waits for
/// a lock that another thread of the host held at that moment.
inline constexpr double fork_begins_s[] = {1, 1, 3};
/// For room in a socket to a peer that reads.
inline constexpr double send_s = 10;
/// For a GPU's driver to list its GPUs. A driver that is not in use starts first, which takes a second or two
/// for each GPU.
inline constexpr double driver_answer_s = 30;
/// For the processes of spawn() to begin.
inline constexpr double spawn_start_s = 60;
/// For the fork server of spawn() to end. It kills processes, and waits for their ends.
inline constexpr double spawn_stop_s = 5;
/// For an earlier checkpoint to be written. A disk that takes longer counts as hanging.
inline constexpr double checkpoint_write_s = 600;

static_assert(send_s < first_words_s && first_words_s < spawn_start_s);
static_assert(fork_server_kill_s + creator_ends_s < spawn_stop_s);

// A world of ranks.

/// Default for a rendezvous and for every collective.
inline constexpr double world_s = 300;
/// When a member of a collective on devices has ended, the others wait this long for the work that it had
/// queued.
inline constexpr double part_of_the_gone_s = 1.0;
/// For an answer of the store.
inline constexpr double store_answer_s = 10;
/// For one attempt to connect. TCP sends a lost packet again after one second.
inline constexpr double connect_s = 3;
/// For the lock of a file store.
inline constexpr double file_lock_s = 10;
/// A rank that leaves a world in shared memory waits for the lock of that world.
inline constexpr double leave_s = 1;
/// How much longer the leaders of nodes wait for each other. When the ranks of a node miss one of their own,
/// their leader tells the other leaders at its deadline.
inline constexpr std::int64_t leaders_margin_ns = 1'500'000'000;
/// How long a rank that has given up waits for the notes of the others.
inline constexpr std::int64_t mesh_farewell_ns = 100'000'000;
/// How much longer the ranks of a node wait for their leader, which may be telling other nodes.
inline constexpr std::int64_t leader_margin_ns = 4'000'000'000;

static_assert(connect_s < store_answer_s && store_answer_s < world_s);
static_assert(leader_margin_ns > leaders_margin_ns + 2 * mesh_farewell_ns);
static_assert(mesh_look_ns < mesh_farewell_ns);

}  // namespace accelmgr::timing
