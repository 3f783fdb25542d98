// The interface of what computes: a replica of the model, as a runner sees it. It deals in names, shapes,
// dtypes and memory; libtorch, Python or a device may implement it. A runner calls a replica in this order:
//
//   open_device(), make_replica()          once; ranks open their devices at the same time
//   describe()                             once; the manager calls nothing else but read_parameters()
//   bind(), seed(), load()                 once
//   begin_attempt()                        in each attempt
//     load_parameters()                    if the host wrote parameters since the last attempt, or the team
//                                          of devices is another one
//     run(), run(), ...                    one micro-batch each
//     collect()                            hands over the remaining gradients, reads loss and scalars
//   save()                                 before the vote; after an aborted attempt load() instead
//
// A gradient's memory belongs to the replica. GradientSink::capture() only reads it, and keeps no pointer to
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/dtype.hpp"
#include "base/unique_fd.hpp"
#include "base/waiter.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/shards.hpp"

namespace accelmgr::replica {

/// A parameter or a buffer of a model, in this process's memory.
struct Tensor {
  std::string name{};
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape{};
  std::vector<std::int64_t> strides{};  ///< In elements.
  std::byte* data = nullptr;            ///< The first element.
  std::uintptr_t identity = 0;          ///< Entries with the same value are one tensor under several names.
  bool requires_grad = true;            ///< For parameters only.
  bool persistent = true;               ///< Part of the state dict.
  bool of_model = true;                 ///< For buffers only: see session::BufferEntry.
  bool rounds = true;                   ///< For parameters only: `runners.parameters: bf16` rounds this one.
};

/// The tensors of a model, in its order. A tensor with several names has an entry for each. Parameters that
/// require gradients are float64, float32, float16, bfloat16, complex64 or complex128; others have any dtype.
struct Description {
  std::vector<Tensor> parameters{};
  std::vector<Tensor> buffers{};
  bool has_values = true;  ///< false: parameters have no values here; the host has them.
};

/// A field of a micro-batch, row-major; dimension 0 is the batch. Its memory belongs to the queue: a replica
/// that changes or keeps the values copies them.
struct Field {
  std::string name{};
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape{};
  const std::byte* data = nullptr;
};

/// Where the values of a parameter lie in the master, or in a copy of it.
struct Place {
  std::byte* data = nullptr;
  std::vector<std::int64_t> strides{};  ///< In elements.
};

/// A copy of the parameters that the ranks of a team share, as one process maps it.
struct SharedParameters {
  std::vector<Place> read{};  ///< What a model computes with. What it writes there is undone, see WriteGuard.
  std::vector<Place> write{};  ///< The same memory, for an optimizer.
};

// What the runner is to its replica. The runner's thread calls these, or a thread that computes for it while
// the runner's thread waits; never two at once.

/// Takes the gradients.
class GradientSink {
 public:
  virtual ~GradientSink() = default;
  /// Takes a gradient of parameter `index` of the manifest: dense, row-major, in the parameter's dtype. The
  /// first one in an attempt is stored, further ones are added. The gradient is copied before it returns.
  virtual void capture(std::size_t index, const void* gradient) = 0;
  /// Whether parameter `index` may have a gradient in this attempt: it was not frozen at the start, or was
  /// unfrozen since. All ranks of an attempt have the same answer.
  virtual bool is_trained(std::size_t) { return true; }
  /// The largest magnitude of the gradient of parameter `index`, which GradientPlaces has or will have, or
  /// which the replica keeps: Inf or NaN if one of its values is. Not called for a gradient without elements.
  virtual void magnitude(std::size_t, double) {}
  /// The replica keeps the gradients of this attempt for apply(), and gives none to the sink; it calls
  /// look_at() or magnitude() for them before collect() returns.
  virtual bool keeps_gradients() { return false; }
  /// Checks whether a gradient that the replica keeps is finite, as capture() does for one that it copies.
  virtual void look_at(std::size_t /*index*/, const void* /*gradient*/) {}
};

/// Where a device copies gradients that it does not give to GradientSink::capture(). It registers slab()
/// once, writes the whole gradient of the attempt (the sum over its micro-batches) to place_of(), and calls
/// arrived() and GradientSink::magnitude(): the values are not read again here. In one attempt a parameter is
/// given either way, not both ways.
class GradientPlaces {
 public:
  virtual ~GradientPlaces() = default;
  /// The memory in which all places lie. Empty if gradients can only be captured.
  virtual std::span<std::byte> slab() { return {}; }
  /// Where the gradient of parameter `index` belongs: dense, row-major, in the slab's dtype.
  /// Requires: slab() is not empty.
  virtual std::byte* place_of(std::size_t) { return nullptr; }
  /// The gradients of these parameters are in their places.
  virtual void arrived(std::span<const std::size_t>) {}
  /// The devices of a team have summed up their gradients, and these bytes are one of this rank's shards of
  /// the sum, as session::ShardPlan places it. They are copied unless they are in their place already. In
  /// such an attempt all ranks of the team give all their shards, and no gradients in another way.
  virtual void shard(session::Bytes, const std::byte*) {}
};

/// Says which parameters to load, and shares them among the ranks of a team.
class ParameterSource {
 public:
  virtual ~ParameterSource() = default;
  /// Whether load_parameters() must copy parameter `index` again. False if it is frozen and was not written.
  /// All ranks of a team have the same answer.
  virtual bool is_stale(std::size_t) { return true; }
  /// Maps the file `memory`, which is laid out as the master's parameters. Call it once. Empty if a runner
  /// does not guard its parameters (`runners.protect_parameters`): others would see what a model writes.
  virtual SharedParameters share(base::UniqueFd /*memory*/) { return {}; }
  /// bind() has moved the model to its device, and the CPU memory that the model was made in is free: the
  /// next rank may build. What follows, as registering pages, goes on meanwhile.
  virtual void built() {}
};

/// How far the attempt is. A replica calls wanted() while it waits for a device. When that returns false, the
/// attempt is over or the session stops: the replica should leave its work unfinished and return.
class Progress : public base::Waiter {
 public:
  /// The forward pass of a micro-batch is done; its backward pass begins.
  virtual void backward_begins() = 0;
  /// True: no micro-batch follows the one that runs now, so its backward pass completes the gradients. False:
  /// perhaps one follows.
  virtual bool last_micro_batch() { return false; }
};

/// What a replica is bound to. All but the array of places outlives the replica.
struct Binding {
  const session::Manifest& manifest;
  std::span<const Place> places;  ///< Of each parameter of the manifest, in the master.
  GradientSink& gradients;
  GradientPlaces& gradient_places;
  ParameterSource& parameters;
  Progress& progress;
};

/// The membership of a replica's device in a team of devices: members sum up their gradients themselves, and
/// give each other the parameters. Each has a replica of its own; all run the same attempts, and load
/// parameters in the same ones.
class TeamMember {
 public:
  virtual ~TeamMember() = default;
  /// Makes the id of a team. One member makes it, and all need it. Throws what a lost device throws.
  virtual session::TeamId make_id() = 0;
  /// Leaves the present team and joins the team of `ranks` from the next attempt on. Waits until all have
  /// come. Returns false if the runner does not want the attempt any more. Throws if joining fails or takes
  /// longer than `timeout_s`; the replica goes on without a team then.
  [[nodiscard]] virtual bool join(const session::TeamId& id, session::RankMask ranks, int rank,
                                  double timeout_s) = 0;
  /// From the next attempt on, the device is alone, as in the beginning. Abandons what the team
  /// has under way; the parameters on the device are undefined until they are loaded again. Throws if the
  /// device has failed.
  virtual void leave() = 0;
  /// Why the team has ended. Empty if it has not, or because the runner did not want the attempt.
  virtual std::string failure() const = 0;
};

/// Working state in the session.
struct State {
  std::byte* buffers = nullptr;  ///< A copy of all buffers, placed as in the manifest; null: leave them.
  std::span<std::byte>
      generator{};  ///< Room for the state of generators: engine/replica/generator_state.hpp.
};
struct ConstState {
  const std::byte* buffers = nullptr;
  std::span<const std::byte> generator{};
};

/// Sums over the micro-batches of an attempt: each contributes its values divided by its divisor.
struct Totals {
  double loss = 0;
  std::vector<std::pair<std::string, double>> scalars{};  ///< In the order in which they first came.
};

/// One thread uses a replica. An exception during an attempt aborts it. A member throws ModelError if the
/// same batch would fail again, and anything else otherwise.
class Replica {
 public:
  virtual ~Replica() = default;

  /// The model's tensors with their initial values. Every call returns the same tensors.
  virtual Description describe() = 0;

  /// Called in the manager when the master has values, so that a data source that computes with the model
  /// sees them. `places` are as for bind(), and may only be read.
  virtual void read_parameters(const session::Manifest&, std::span<const Place> /*places*/) {}

  /// Binds the replica to the master: from now on it uses the master's parameters and gives its gradients to
  /// the runner. A replica in CPU memory uses the parameters where they lie; one on a device copies them in
  /// load_parameters(). The manifest lists each tensor of describe() once, in the same order.
  virtual void bind(const Binding& to) = 0;

  /// Seeds all generators that the model may draw from.
  virtual void seed(std::uint64_t seed) = 0;

  /// Discards what an aborted attempt left.
  virtual void begin_attempt() = 0;
  /// The host wrote parameters since the last attempt (ParameterSource::is_stale()). A device may copy them
  /// asynchronously, or in the first run() or collect().
  virtual void load_parameters() {}
  /// Runs forward and backward of one micro-batch, with the loss divided by `divisor`. May be asynchronous;
  /// reads no result back.
  virtual void run(std::span<const Field> batch, double divisor) = 0;
  /// Waits for the work of run(), hands the remaining gradients to the sink, then reads loss and scalars.
  virtual Totals collect() = 0;

  /// The attempt is committed, and the replica updates its parameters, which stay with it. `mean` has the
  /// gradient of each parameter in the master; null: it has none. If GradientSink::keeps_gradients(), it is
  /// empty, and the gradients are those that the replica has kept, times `scale`. Returns their norm, if it
  /// was computed for clipping, or 0.
  virtual double apply(std::span<const std::byte* const> /*mean*/, double /*scale*/) { return 0; }

  /// run() has changed a parameter and not put it back, which is an error.
  virtual void parameter_changed(const std::string& /*name*/) {}
  /// Between two steps: makes the call that the host has left for it. The call's own errors are its result.
  virtual void call() {}

  /// The device's membership in teams, which lives as long as the replica. Null: it has none. Throws
  /// UsageError if it needs something that is missing.
  /// Requires: bind() was called.
  virtual TeamMember* team_member() { return nullptr; }

  /// Copies the working state (buffers, generators) to the session, and back.
  virtual void save(const State& to) = 0;
  virtual void load(const ConstState& from) = 0;
};

/// What a replica is made for.
struct Role {
  /// In the manager: gives the session its initial values, on the CPU. Generators begin at `seed_base`.
  static constexpr Role description() { return {}; }
  /// In the runner of that rank: computes, with compute_threads() threads (runner/rank_setup.hpp) or on a
  /// device of its own.
  static constexpr Role runner(int rank) { return {rank}; }
  bool computes() const { return rank >= 0; }

  int rank = -1;  ///< -1: in the manager.
};

using Factory = std::function<std::unique_ptr<Replica>(const Config&, Role)>;
/// Opens the device on which the factory's replica will compute, which takes up to seconds, and runs no code
/// of the user.
using Opener = std::function<void(const Config&, Role)>;

/// Registers the factory of models with that `model.kind`; an empty kind stands for all kinds without a
/// factory of their own. A later factory of a kind replaces an earlier one. Call it before a manager starts.
void register_factory(const std::string& kind, Factory factory, Opener opener = nullptr);

/// Call it in a runner with a GPU, before make_replica(). Throws as make_replica() does.
void open_device(const Config& config, Role role);

/// Makes a replica of `config.model.kind`. Throws ConfigError for a kind without a factory. Errors of
/// accelmgr that the factory throws pass unchanged; any other exception becomes a ModelError that names the
/// kind.
std::unique_ptr<Replica> make_replica(const Config& config, Role role);

}  // namespace accelmgr::replica
