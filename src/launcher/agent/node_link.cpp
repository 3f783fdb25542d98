#include "launcher/agent/node_link.hpp"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/ipc/uninterrupted.hpp"

namespace accelmgr::agent {
namespace {

constexpr std::chrono::milliseconds look_again{200};
constexpr std::chrono::milliseconds meet_again{50};
constexpr double leave_s = 3;

}  // namespace

struct NodeLink::Shared : std::enable_shared_from_this<Shared> {
  using Command = std::function<void(Nodes&)>;
  enum class Awaited { outcome, all_ended, world, nothing };

  Shared(boost::asio::io_context& l, OpenStore o, Node s, double timeout_s, NodeEvents e)
      : loop(l),
        open(std::move(o)),
        self(std::move(s)),
        rendezvous_timeout_s(timeout_s),
        events(std::move(e)) {}

  /// How long to wait for the nodes of a world. When node 0 has waited so long, it decides whether an elastic
  /// world has enough nodes. The other nodes wait longer, for its decision.
  double patience_s() const {
    return rendezvous_timeout_s + (self.is_elastic() && self.node_rank != 0 ? Nodes::lost_after_s : 0);
  }

  // Called by the link's thread.
  void run() noexcept;
  void serve();
  bool meet(Nodes& nodes);
  void await(Nodes& nodes);
  bool next_round(std::chrono::milliseconds interval, Nodes& nodes);
  template <class Event, class... Args>
  void tell(Event& event, Args... args) {
    const std::lock_guard lock(mutex);
    if (closing) return;
    boost::asio::post(loop, [self = shared_from_this(), &event, ... args = std::move(args)]() mutable {
      if (!self->closing) event(std::move(args)...);  // No lock: only the loop's thread writes `closing`.
    });
  }

  // Called by the loop's thread.
  void order(Command command) {
    {
      const std::lock_guard lock(mutex);
      commands.push_back(std::move(command));
    }
    changed.notify_all();
  }

  boost::asio::io_context& loop;
  const OpenStore open;
  const Node self;
  const double rendezvous_timeout_s;
  NodeEvents events;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Command> commands;
  bool closing = false;  ///< Written by the loop's thread, under the mutex.
  bool ended = false;

  // Used by the link's thread only.
  std::unique_ptr<distributed::TcpStore> store;
  Awaited awaited = Awaited::outcome;
  int next_attempt = 0;
  base::Deadline begin_deadline = base::Deadline::at_ns(0);
};

void NodeLink::Shared::run() noexcept {
  try {
    serve();
  } catch (...) {
    tell(events.broken, std::current_exception());
  }
  store.reset();
  const std::lock_guard lock(mutex);
  ended = true;
  changed.notify_all();
}

void NodeLink::Shared::serve() {
  store = open();
  Nodes nodes(*store, self);
  struct Leave {
    Nodes& nodes;
    ~Leave() { nodes.leave(base::Deadline::in_seconds(leave_s)); }
  } leave{nodes};
  if (!meet(nodes)) return;
  do await(nodes);
  while (next_round(look_again, nodes));
}

bool NodeLink::Shared::meet(Nodes& nodes) {
  const auto deadline = base::Deadline::in_seconds(patience_s());
  do {
    const bool late = deadline.passed();
    if (auto world = nodes.meet(!late)) {
      tell(events.met, std::move(*world));
      return true;
    }
    if (late) throw nodes.missing(store->address(), patience_s());
  } while (next_round(meet_again, nodes));
  return false;
}

/// Waits for commands, at most for the interval, and runs them. False if the link is closing.
bool NodeLink::Shared::next_round(std::chrono::milliseconds interval, Nodes& nodes) {
  std::deque<Command> ordered;
  bool leaving = false;
  {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, interval, [this] { return closing || !commands.empty(); });
    ordered.swap(commands);
    leaving = closing;
  }
  for (const auto& command : ordered) command(nodes);
  return !leaving;
}

void NodeLink::Shared::await(Nodes& nodes) {
  if (awaited == Awaited::nothing) return nodes.beat();
  if (awaited == Awaited::outcome) {
    auto outcome = nodes.look();
    if (outcome.kind == Nodes::Outcome::Kind::running) return;
    awaited = Awaited::nothing;
    tell(events.outcome, std::move(outcome));
  } else if (auto why = nodes.stopped()) {
    awaited = Awaited::nothing;
    tell(events.outcome, Nodes::Outcome{Nodes::Outcome::Kind::stopped, std::move(*why)});
  } else if (awaited == Awaited::all_ended) {
    auto all = nodes.all_ended();
    if (!all) return;
    awaited = Awaited::nothing;
    tell(events.all_ended, std::move(*all));
  } else if (auto world = nodes.begin(next_attempt, [this] { store->erase_all_but(Nodes::prefix); })) {
    awaited = Awaited::outcome;
    tell(events.met, std::move(*world));
  } else if (begin_deadline.passed()) {
    nodes.give_up(nodes.missing(store->address(), patience_s()));
  }
}

NodeLink::NodeLink(boost::asio::io_context& loop, OpenStore open, Node self, double rendezvous_timeout_s,
                   NodeEvents events)
    : shared_(std::make_shared<Shared>(loop, std::move(open), std::move(self), rendezvous_timeout_s,
                                       std::move(events))) {
  const ipc::SignalsBlocked blocked;  // New threads inherit the mask: only the loop's thread handles signals.
  std::thread([shared = shared_] { shared->run(); }).detach();
}

NodeLink::~NodeLink() { close(base::Deadline::in_seconds(1)); }

void NodeLink::failed(Failure failure) {
  shared_->order([failure = std::move(failure)](Nodes& nodes) { nodes.report_failed(failure); });
}

void NodeLink::done() {
  shared_->order([](Nodes& nodes) { nodes.report_done(); });
}

void NodeLink::stop(Failure why) {
  shared_->order([why = std::move(why)](Nodes& nodes) { nodes.stop(why); });
}

void NodeLink::ended(EndedNode ended) {
  shared_->order([shared = shared_.get(), ended = std::move(ended)](Nodes& nodes) {
    nodes.report_ended(ended);
    shared->awaited = Shared::Awaited::all_ended;
  });
}

void NodeLink::begin(int attempt) {
  shared_->order([shared = shared_.get(), attempt](Nodes&) {
    shared->next_attempt = attempt;
    shared->begin_deadline = base::Deadline::in_seconds(shared->patience_s());
    shared->awaited = Shared::Awaited::world;
  });
}

bool NodeLink::close(base::Deadline deadline) {
  std::unique_lock lock(shared_->mutex);
  shared_->closing = true;
  shared_->changed.notify_all();
  const auto left = std::chrono::nanoseconds(std::max<std::int64_t>(deadline.remaining_ns(), 0));
  return shared_->changed.wait_for(lock, left, [this] { return shared_->ended; });
}

}  // namespace accelmgr::agent
