// The step protocol of one rank, around a replica: wait for the trigger, compute, vote, reduce a slice.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/ipc/memory.hpp"
#include "base/unique_fd.hpp"
#include "engine/replica/replica.hpp"
#include "engine/runner/batches.hpp"
#include "engine/runner/gradients.hpp"
#include "engine/runner/rounded_parameters.hpp"
#include "engine/runner/team_part.hpp"
#include "engine/runner/write_guard.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/parameter_update.hpp"
#include "engine/session/reduction.hpp"
#include "engine/session/session.hpp"
#include "engine/session/spans.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::runner {

/// Used by one thread.
class Runner final : private replica::GradientSink,
                     private replica::GradientPlaces,
                     private replica::ParameterSource,
                     private replica::Progress {
 public:
  /// Builds the replica over the master parameters, with the working state of the last commit. `lifeline` is
  /// one end of a socket: when it ends, the manager is gone. A runner with a GPU says there when its replica
  /// is built (process.hpp). Throws ModelError, also when the model is not that of the manifest.
  Runner(const Config& config, const session::RunnerView& runner, int lifeline);
  /// Takes part in attempts until the session stops or the lifeline ends. When the replica throws, refuses
  /// the attempt and throws on.
  void serve();

 private:
  // replica::GradientSink.
  void capture(std::size_t index, const void* gradient) override { gradients_.capture(index, gradient); }
  bool is_trained(std::size_t index) override { return gradients_.is_trained(index); }
  void magnitude(std::size_t index, double largest) override {
    if (!team_part_->in_team()) gradients_.note(index, largest);  // A team looks at its sum.
  }
  bool keeps_gradients() override {
    return session_.control().request.applies == session::Applies::one_replica;
  }
  void look_at(std::size_t index, const void* gradient) override { gradients_.look_at(index, gradient); }

  // replica::GradientPlaces.
  std::span<std::byte> slab() override { return gradients_.slab(); }
  std::byte* place_of(std::size_t index) override { return gradients_.place_of(index); }
  void arrived(std::span<const std::size_t> indices) override { gradients_.arrived(indices); }
  void shard(session::Bytes shard, const std::byte* sums) override { gradients_.shard(shard, sums); }

  // replica::ParameterSource.
  bool is_stale(std::size_t index) override { return frozen_are_stale_ || gradients_.is_trained(index); }
  replica::SharedParameters share(base::UniqueFd memory) override;
  void built() override;

  // replica::Progress.
  void backward_begins() override;
  bool last_micro_batch() override { return last_micro_batch_; }
  bool wanted() override;
  void never_ends(const std::string& what) override;

  void attempt(std::uint64_t number);
  void load_parameters();
  void compute();
  void skip();
  void micro_batch(Batches::Filled filled);
  void collect();
  void check_finite();
  void check_sums();
  void found_nonfinite(bool scaled, const std::string& what);
  std::optional<Batches::Filled> next_batch();
  void vote();
  bool refuse();
  bool loses_a_member();
  void acknowledge(bool committed);
  void map_for_updates();
  void update();
  void apply();

  void populate();
  void load_committed_state();
  void load_state();
  replica::State state_in(std::uint32_t index) const;
  void keep_weight(const std::vector<std::pair<std::string, double>>& scalars);
  void keep_scalars(const std::vector<std::pair<std::string, double>>& scalars);
  void tell_of_scalars(const std::vector<std::string>& left_out);
  bool is_first() const noexcept;
  bool over() const;
  bool stopping() const;
  void enter(session::Phase phase) noexcept;
  void enter(session::Phase phase, session::Activity activity) noexcept;
  void enter(session::Activity activity) noexcept;
  void give_sign_of_life() noexcept;

  static constexpr std::uint64_t unknown_version = ~std::uint64_t{0};

  const Config& config_;
  session::RunnerView view_;
  const session::Session& session_;
  session::Manifest manifest_;
  int rank_;
  int lifeline_;
  session::RunnerRecord& record_;
  session::ActivityWriter activities_;
  Batches batches_;
  base::Helpers helpers_;  ///< For the reduction.
  Gradients gradients_;
  session::Reduction reduction_;
  session::ParameterUpdate update_;
  ipc::Mapping parameters_to_write_;  ///< For updates, if the parameters are protected.
  std::optional<RoundedParameters> rounded_parameters_;
  base::UniqueFd shared_;  ///< See share(). The replica uses the mappings.
  ipc::Mapping shared_to_read_, shared_to_write_;
  std::unique_ptr<replica::Replica> replica_;
  std::optional<WriteGuard> write_guard_;
  std::optional<TeamPart> team_part_;  ///< Set by the constructor.
  session::Ballot ballot_{};
  std::uint64_t attempt_ = 0;         ///< The attempt under way, or the last one.
  session::RankMask populated_ = 0;   ///< Ranks whose slabs have their pages present in this process.
  std::uint64_t buffer_version_ = 0;  ///< The version of the buffers that was loaded last.
  std::uint64_t parameter_version_ = unknown_version;  ///< The version that the replica loaded last.
  std::uint64_t frozen_version_ = 0;                   ///< The same for frozen parameters.
  bool frozen_are_stale_ = true;
  bool last_micro_batch_ = false;  ///< No micro-batch follows the one that runs.
  bool left_ = false;              ///< wanted() has told the replica to leave the attempt.
  bool told_of_scalars_ = false;
};

}  // namespace accelmgr::runner
