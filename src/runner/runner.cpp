#include "runner/runner.hpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <malloc.h>
#include <poll.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <thread>

#include "accelmgr/errors.hpp"
#include "accelmgr/model.hpp"
#include "base/clock.hpp"
#include "base/fault_point.hpp"
#include "base/log.hpp"
#include "config/faults.hpp"
#include "ipc/epoch.hpp"
#include "ipc/socket.hpp"
#include "model/autocast.hpp"
#include "model/checked_forward.hpp"
#include "model/checked_loss.hpp"
#include "runner/write_guard.hpp"
#include "session/attempt.hpp"
#include "session/batch_queue.hpp"
#include "session/reduction.hpp"
#include "tensor/exception_text.hpp"
#include "tensor/generator.hpp"
#include "tensor/master.hpp"
#include "tensor/take_over.hpp"

namespace accelmgr::runner {
namespace {

using base::FaultPhase;
using session::Phase;
using session::Reason;

constexpr std::int64_t wait_slice_ns = 20'000'000;

// Backward frees and allocates the same large blocks every step; by default malloc gives them back to the
// kernel each time (measured: 80 ms against 43 for 128 MiB of gradient).
void keep_freed_pages() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 2'000'000'000);
}

int thread_count(const Config& config) {
  if (config.runners.threads > 0) return config.runners.threads;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / config.nprocs);
}

/// "'a', 'b' and 3 more"
std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t most = 5;
  const auto shown = std::min(names.size(), most);
  auto text = fmt::format(
      "'{}'", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown), "', '"));
  if (names.size() > most) text += fmt::format(" and {} more", names.size() - most);
  return text;
}

/// A batch that the data has not, or not any more.
struct NoBatch {
  Reason reason;  ///< none: the attempt is over, nobody waits for this runner's reason.
  std::string what;
};

class Runner {
 public:
  Runner(const Config& config, const session::Session& session, int rank, int lifeline);
  void serve();

 private:
  void attempt(std::uint64_t number);
  void compute(std::uint64_t number);
  void skip(std::uint64_t number);
  void populate();
  void load_committed_state();
  void load_buffers();
  void micro_batch(session::BatchQueue::Filled filled);
  session::BatchQueue::Filled next_batch(std::uint64_t number);
  std::optional<session::BatchQueue::Filled> next_or_end(std::uint64_t number);
  Batch batch_of(session::BatchQueue::Filled filled) const;
  void keep_scalars(const Outputs& outputs, double weight);
  void tell_of_scalars(const std::vector<std::string>& left_out);
  void vote(std::uint64_t number);
  void refuse(std::uint64_t number);
  void settle(std::uint64_t number, bool committed);
  bool over(std::uint64_t number) const;
  bool stopping() const;
  void enter(Phase phase) noexcept;

  const Config& config_;
  const session::Session& session_;
  session::Manifest manifest_;
  int rank_;
  int lifeline_;
  session::RankRecord& record_;
  session::BatchQueue queue_;
  std::unique_ptr<Model> model_;
  tensor::ModelTensors tensors_;
  std::unique_ptr<tensor::TakeOver> take_over_;
  session::Reduction reduction_;
  session::Ballot ballot_{};
  session::RankMask populated_ = 0;   ///< The ranks whose slabs are present in this process.
  std::uint64_t buffer_version_ = 0;  ///< The version of the host's buffers that was loaded last.
  bool told_of_scalars_ = false;
};

Runner::Runner(const Config& config, const session::Session& session, int rank, int lifeline)
    : config_(config),
      session_(session),
      manifest_(session::read_manifest(session_.manifest())),
      rank_(rank),
      lifeline_(lifeline),
      record_(session_.record(rank)),
      queue_(session_, rank),
      reduction_(session_, manifest_) {
  enter(Phase::init);
  base::fault_point(FaultPhase::init);
  keep_freed_pages();
  populate();
  at::set_num_threads(thread_count(config));
  at::globalContext().setDeterministicAlgorithms(config.deterministic, /*warn_only=*/true);
  const auto begin = base::now_ns();
  model_ = make_model(config);
  record_.model_ns.store(static_cast<std::uint64_t>(base::now_ns() - begin));
  tensor::in_user_code<ModelError>(fmt::format("model '{}'", config.model.kind), [&] {
    model_->train(true);
    tensors_ = tensor::describe(model_->parameters(), model_->buffers());
  });
  tensor::bind_parameters(tensors_, session_, manifest_);
  if (config.runners.protect_parameters) guard_parameters(session_, manifest_, rank);
  take_over_ = std::make_unique<tensor::TakeOver>(session_, manifest_, tensors_, rank);

  load_committed_state();
}

// Again when the team has grown, while there is nothing else to do.
void Runner::populate() {
  const auto team = session_.control().team.load();
  if ((team & ~populated_) == 0) return;
  session_.populate_for(rank_, team);
  populated_ |= team;
}

// What a first runner begins with, and a replacement goes on with, are the valid copies of the last commit.
// Which these are is certain when the attempt in which its predecessor was lost is closed; the next waits for
// this runner. A rank that took no part in that step starts from the master's buffers, as replicas of
// DistributedDataParallel do.
void Runner::load_committed_state() {
  while (!session_.word().closed && !stopping()) {
    const auto seen = ipc::load(session_.control().finish);
    if (!session_.word().closed) ipc::wait_changed(session_.control().finish, seen, wait_slice_ns, 0);
  }
  buffer_version_ = session_.control().buffer_version.load();  // If they are written just now, again.
  const auto valid = session_.word().index;
  const auto& counters = session_.counters(valid);
  auto* own = session_.buffers(valid, rank_);
  if (counters.steps > 0 && (counters.participants >> rank_ & 1) == 0)
    std::memcpy(own, session_.result_buffers(valid), session_.header().buffer_bytes);
  tensor::seed_generator(config_.seed_base + static_cast<std::uint64_t>(rank_));
  tensor::load_generator(session_.generator(valid, rank_));
  tensor::load_buffers(tensors_, manifest_, own);
  tensor::store_generator(session_.generator(valid, rank_));
  record_.settled.store(session_.word().attempt);
}

// buffers() first: what the model has put in the place of one gives way to the tensor that is loaded into.
void Runner::load_buffers() {
  buffer_version_ = session_.control().buffer_version.load();
  model_->buffers();
  tensor::load_buffers(tensors_, manifest_, session_.buffers(session_.word().index, rank_));
}

void Runner::enter(Phase phase) noexcept {
  record_.phase.store(phase, std::memory_order_relaxed);
  record_.heartbeat.store(record_.heartbeat.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

bool Runner::stopping() const {
  if (session_.control().stopping.load() != 0) return true;
  pollfd end{.fd = lifeline_, .events = POLLIN, .revents = 0};
  return poll(&end, 1, 0) > 0;
}

bool Runner::over(std::uint64_t number) const {
  const auto word = session_.word();
  return word.attempt != number || word.closed || word.abort;
}

void Runner::serve() {
  auto& control = session_.control();
  while (session_.control().stopping.load() == 0) {
    const auto seen = ipc::load(control.trigger);
    const auto word = session_.word();
    const bool mine = (control.request.participants >> rank_ & 1) != 0;
    if (word.attempt > record_.settled.load(std::memory_order_relaxed) && mine) {
      if (!word.closed) {
        attempt(word.attempt);
        // It was left open, to stop. Begun again, it would add to a slab that may have been voted for.
        if (record_.settled.load(std::memory_order_relaxed) < word.attempt) break;
        continue;
      }
      settle(word.attempt, !word.abort);  // Another rank ended it before this one woke.
    }
    enter(Phase::waiting);
    if (ipc::wait_changed(control.trigger, seen, wait_slice_ns, config_.runners.spin_us)) continue;
    if (stopping()) break;
    populate();
  }
  enter(Phase::stopping);
  base::log().debug("stops");
}

void Runner::attempt(std::uint64_t number) {
  record_.attempt.store(number);
  base::set_log_step(session_.counters(session_.word().index).steps + 1);
  reduction_.reset_cursor(rank_, number);
  take_over_->begin(number);
  ballot_ = {};
  base::log().debug("attempt {} begins", number);
  try {
    if (buffer_version_ != session_.control().buffer_version.load()) load_buffers();  // The host wrote them.
    if (session_.control().request.skip != 0) {
      skip(number);
    } else {
      compute(number);
    }
    vote(number);
  } catch (const NoBatch& none) {
    if (none.reason != Reason::none)
      session::refuse_attempt(session_, number, rank_, none.reason, none.what.c_str());
  } catch (...) {  // User code: a model, and what it is made of, may throw anything.
    refuse(number);
    throw;
  }
  auto& control = session_.control();
  for (;;) {
    const auto seen = ipc::load(control.votes);
    const auto word = session_.word();
    if (word.attempt == number && word.committed(control.request.participants)) break;
    if (over(number)) return settle(number, word.attempt == number && word.closed && !word.abort);
    enter(Phase::vote);  // A sign of life.
    if (!ipc::wait_changed(control.votes, seen, wait_slice_ns, config_.runners.spin_us) && stopping()) return;
  }
  enter(Phase::reduce);
  reduction_.finish_slice(rank_, number);
  settle(number, true);
  base::fault_point(FaultPhase::close);
  session::close_if_over(session_, number);
}

// In a handler of what the model threw.
void Runner::refuse(std::uint64_t number) {
  const auto text = tensor::current_exception_text();
  auto reason = Reason::exception;
  try {
    throw;
  } catch (const ModelError&) {
    reason = Reason::model_error;
  } catch (const c10::Error&) {  // In backward: with the same elements it comes again.
    reason = Reason::model_error;
  } catch (...) {
    // The model's own business.
  }
  session::refuse_attempt(session_, number, rank_, reason, text.c_str());
}

// After an abort the working state is that of the last commit again: the attempt leaves no trace.
void Runner::settle(std::uint64_t number, bool committed) {
  if (!committed) {
    const auto valid = session_.word().index;
    load_buffers();
    tensor::load_generator(session_.generator(valid, rank_));
  }
  base::log().debug("attempt {} is {}", number, committed ? "committed" : "over without a result");
  record_.settled.store(number);
  ipc::advance(session_.control().life);
}

session::BatchQueue::Filled Runner::next_batch(std::uint64_t number) {
  enter(Phase::data);
  base::fault_point(FaultPhase::data);
  session::BatchQueue::Filled filled{};
  const auto begin = base::now_ns();
  const auto position = queue_.released() + ballot_.micro_batches;
  const auto state = queue_.wait(position, filled, config_.runners.spin_us, [&] {
    enter(Phase::data);  // A sign of life.
    return over(number) || stopping();
  });
  ballot_.data_ns += static_cast<std::uint64_t>(base::now_ns() - begin);
  switch (state) {
    case session::BatchQueue::State::filled:
      break;
    case session::BatchQueue::State::ended:
      throw NoBatch{Reason::data_end, "the data has ended"};
    case session::BatchQueue::State::failed:
      throw NoBatch{Reason::data_error, queue_.error()};
    case session::BatchQueue::State::empty:
      throw NoBatch{Reason::none, {}};
  }
  return filled;
}

// An uneven end: what there is makes a last, shorter step, unless the configuration leaves it out (nullopt).
// Element i goes to rank i mod N: where the first rank has nothing, nobody has.
std::optional<session::BatchQueue::Filled> Runner::next_or_end(std::uint64_t number) {
  try {
    return next_batch(number);
  } catch (const NoBatch& none) {
    const auto participants = session_.control().request.participants;
    const bool first = (participants & ((session::RankMask{1} << rank_) - 1)) == 0;
    if (none.reason != Reason::data_end || config_.data.drop_last || (first && ballot_.micro_batches == 0))
      throw;
    return std::nullopt;
  }
}

// A copy: a model may write into its batch, or keep it, and a step that is repeated begins with the same.
Batch Runner::batch_of(session::BatchQueue::Filled filled) const {
  std::vector<NamedTensor> fields;
  fields.reserve(manifest_.fields.size());
  for (const auto& field : manifest_.fields) {
    std::vector<std::int64_t> shape{static_cast<std::int64_t>(filled.elements)};
    shape.insert(shape.end(), field.shape.begin(), field.shape.end());
    auto* data = const_cast<std::byte*>(filled.slot) + field.offset;
    const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(field.dtype));
    fields.push_back({field.name, at::from_blob(data, shape, options).clone()});
  }
  return Batch(std::move(fields));
}

void Runner::keep_scalars(const Outputs& outputs, double weight) {
  std::vector<std::string> left_out;
  for (const auto& [name, value] : outputs.scalars) {
    std::uint32_t i = 0;
    while (i < ballot_.scalars && name != ballot_.scalar[i].name) ++i;
    if (i == ballot_.scalars) {
      if (i == session::max_scalars || name.size() >= session::scalar_name_bytes) {
        left_out.push_back(name);
        continue;
      }
      name.copy(ballot_.scalar[i].name, name.size());
      ++ballot_.scalars;
    }
    ballot_.scalar[i].sum += value * weight;
  }
  if (!left_out.empty() && !told_of_scalars_) tell_of_scalars(left_out);
}

// Once, and aloud by one rank of them all: the others have the same model.
void Runner::tell_of_scalars(const std::vector<std::string>& left_out) {
  told_of_scalars_ = true;
  const auto participants = session_.control().request.participants;
  const bool first = (participants & ((session::RankMask{1} << rank_) - 1)) == 0;
  base::log().log(first ? spdlog::level::warn : spdlog::level::info,
                  "the numbers {} of the model's output are left out of the results: at most {} are carried, "
                  "of names below {} bytes",
                  listed(left_out), session::max_scalars, session::scalar_name_bytes);
}

void Runner::micro_batch(session::BatchQueue::Filled filled) {
  const auto& request = session_.control().request;
  const double full = double(request.micro_batches) * __builtin_popcount(request.participants);
  const bool partial = request.by_samples != 0 && filled.elements != request.batch_size;
  const double share = partial ? double(filled.elements) / request.batch_size : 1.0;
  enter(Phase::forward);
  const auto effect = base::fault_point(FaultPhase::forward);
  at::Tensor loss;
  {
    const model::AutocastScope autocast(config_.runners.autocast == Autocast::bf16);
    const auto outputs = model::checked_forward(*model_, batch_of(filled));
    loss = model::checked_loss(outputs);
    if (loss.scalar_type() != at::kDouble) loss = loss.to(at::kFloat);
    keep_scalars(outputs, share / full);
  }
  loss = loss.div(full);
  if (effect == base::FaultEffect::nan) loss = loss.mul(std::numeric_limits<double>::quiet_NaN());
  if (partial) loss = loss.mul(share);
  const double value = loss.item().toDouble();
  ballot_.loss += value;
  if (!std::isfinite(value)) ballot_.nonfinite = 1;
  enter(Phase::backward);
  base::fault_point(FaultPhase::backward);
  take_over_->backward(loss);
  ballot_.samples += filled.elements;
  ballot_.elements += filled.elements;
  ++ballot_.micro_batches;
}

void Runner::compute(std::uint64_t number) {
  const auto& control = session_.control();
  base::fault_point(FaultPhase::load_parameters);
  ballot_.parameter_version = control.parameter_version.load();
  if (ballot_.parameter_version != control.request.parameter_version)
    throw NoBatch{Reason::parameters_changed, "the parameters were written while the step began"};
  const auto begin = base::now_ns();
  for (std::uint32_t i = 0; i < control.request.micro_batches && !over(number); ++i) {
    const auto filled = next_or_end(number);
    if (!filled) break;
    micro_batch(*filled);
    if (filled->elements < control.request.batch_size) break;
  }
  take_over_->finish();
  tensor::check_aliases(tensors_, model_->parameters(), session_, manifest_);
  ballot_.compute_ns = static_cast<std::uint64_t>(base::now_ns() - begin) - ballot_.data_ns;
  if (const auto names = take_over_->nonfinite(); !names.empty() || ballot_.nonfinite != 0) {
    ballot_.nonfinite = 1;
    const auto what = names.empty() ? fmt::format("the loss is {}", ballot_.loss)
                                    : fmt::format("the gradient of {} is not finite (loss {})", listed(names),
                                                  ballot_.loss);
    if (control.request.refuse_nonfinite != 0) throw NoBatch{Reason::nonfinite, what};
  }
}

// Consumes what compute() would, so that the next attempt meets other batches.
void Runner::skip(std::uint64_t number) {
  const auto& request = session_.control().request;
  ballot_.parameter_version = request.parameter_version;
  while (ballot_.micro_batches < request.micro_batches) {
    const auto filled = next_or_end(number);
    if (!filled) break;
    ballot_.elements += filled->elements;
    ++ballot_.micro_batches;
    if (filled->elements < request.batch_size) break;
  }
}

void Runner::vote(std::uint64_t number) {
  enter(Phase::vote);
  if (over(number)) return;
  const auto other = session_.word().index ^ 1;
  model_->buffers();
  tensor::store_buffers(tensors_, manifest_, session_.buffers(other, rank_));
  tensor::store_generator(session_.generator(other, rank_));
  record_.ballot = ballot_;
  base::fault_point(FaultPhase::vote);
  base::log().debug(
      "attempt {}: votes, with loss {} of {} samples, {:.3f} ms of computing, {:.3f} ms of waiting for data",
      number, ballot_.loss, ballot_.samples, double(ballot_.compute_ns) / 1e6, double(ballot_.data_ns) / 1e6);
  session::cast_vote(session_, number, rank_);
  base::fault_point(FaultPhase::voted);
}

}  // namespace

int run(const Config& config, ipc::SpawnRequest request) {
  const auto begin = base::now_ns();
  base::start_logging(fmt::format("rank {}", request.rank));
  const base::UniqueFd lifeline = std::move(request.fds.back());
  request.fds.pop_back();
  const auto session =
      session::Session::attach(std::move(request.fds), request.rank, config.runners.protect_parameters);
  session.keep_from_children();
  auto& record = session.record(request.rank);
  base::keep_log_tail(record.log.text, record.log.written);
  try {
    record.reason.store(Reason::none);
    record.error[0] = 0;
    config::arm_faults(config, request.rank, request.generation);
    Runner runner(config, session, request.rank, lifeline.get());
    record.start_ns.store(static_cast<std::uint64_t>(base::now_ns() - begin));
    ipc::send(lifeline.get(), "ready");
    runner.serve();
    std::fflush(nullptr);
    _exit(0);      // Nothing here needs a destructor, and torch's take long.
  } catch (...) {  // User code: a factory may throw anything.
    if (const auto reason = record.reason.load();
        reason != Reason::exception && reason != Reason::model_error) {
      const auto what = tensor::current_exception_text();
      record.error[what.copy(record.error, session::text_bytes - 1)] = 0;
      record.reason.store(Reason::exception);
    }
    base::log().info("{}",
                     static_cast<const char*>(record.error));  // The supervisor reports it, with this line.
    _exit(exit_failed);
  }
}

}  // namespace accelmgr::runner
