#include "runner/runner.hpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <malloc.h>
#include <poll.h>

#include <cmath>
#include <map>
#include <thread>

#include "accelmgr/errors.hpp"
#include "accelmgr/model.hpp"
#include "base/clock.hpp"
#include "base/log.hpp"
#include "ipc/epoch.hpp"
#include "model/autocast.hpp"
#include "model/checked_loss.hpp"
#include "runner/write_guard.hpp"
#include "session/attempt.hpp"
#include "session/batch_queue.hpp"
#include "session/reduction.hpp"
#include "tensor/generator.hpp"
#include "tensor/master.hpp"
#include "tensor/take_over.hpp"

namespace accelmgr::runner {
namespace {

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
  void micro_batch(session::BatchQueue::Filled filled);
  session::BatchQueue::Filled next_batch(std::uint64_t number);
  Batch batch_of(session::BatchQueue::Filled filled) const;
  void keep_scalars(const Outputs& outputs, double weight);
  void vote(std::uint64_t number);
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
  keep_freed_pages();
  session_.populate_for(rank, session_.control().team.load());
  at::set_num_threads(thread_count(config));
  at::globalContext().setDeterministicAlgorithms(config.deterministic, /*warn_only=*/true);
  model_ = make_model(config);
  model_->train(true);
  tensors_ = tensor::describe(model_->parameters(), model_->buffers());
  tensor::bind_parameters(tensors_, session_, manifest_);
  if (config.runners.protect_parameters) guard_parameters(session_, manifest_, rank);
  take_over_ = std::make_unique<tensor::TakeOver>(session_, manifest_, tensors_, rank);

  // What a first runner begins with, and a replacement goes on with, are the valid copies of the last commit.
  const auto valid = session_.word().index;
  tensor::seed_generator(config.seed_base + static_cast<std::uint64_t>(rank));
  tensor::load_generator(session_.generator(valid, rank));
  tensor::load_buffers(tensors_, manifest_, session_.buffers(valid, rank));
  tensor::store_generator(session_.generator(valid, rank));
  record_.settled.store(session_.word().attempt);
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
        continue;
      }
      settle(word.attempt, !word.abort);  // Another rank ended it before this one woke.
    }
    enter(Phase::waiting);
    if (!ipc::wait_changed(control.trigger, seen, wait_slice_ns, config_.runners.spin_us) && stopping())
      break;
  }
  enter(Phase::stopping);
}

void Runner::attempt(std::uint64_t number) {
  record_.attempt.store(number);
  base::set_log_step(session_.counters(session_.word().index).steps + 1);
  reduction_.reset_cursor(rank_, number);
  take_over_->begin(number);
  ballot_ = {};
  try {
    compute(number);
    vote(number);
  } catch (const NoBatch& none) {
    if (none.reason != Reason::none)
      session::refuse_attempt(session_, number, rank_, none.reason, none.what.c_str());
  } catch (const ModelError& error) {
    session::refuse_attempt(session_, number, rank_, Reason::model_error, error.what());
    throw;
  } catch (const std::exception& error) {
    session::refuse_attempt(session_, number, rank_, Reason::exception, error.what());
    throw;
  }
  auto& control = session_.control();
  for (;;) {
    const auto seen = ipc::load(control.votes);
    const auto word = session_.word();
    if (word.attempt == number && word.committed(control.request.participants)) break;
    if (over(number)) return settle(number, word.attempt == number && word.closed && !word.abort);
    if (!ipc::wait_changed(control.votes, seen, wait_slice_ns, config_.runners.spin_us) && stopping()) return;
  }
  enter(Phase::reduce);
  reduction_.finish_slice(rank_, number);
  settle(number, true);
  session::close_if_over(session_, number);
}

// After an abort the working state is that of the last commit again: the attempt leaves no trace.
void Runner::settle(std::uint64_t number, bool committed) {
  if (!committed) {
    const auto valid = session_.word().index;
    tensor::load_buffers(tensors_, manifest_, session_.buffers(valid, rank_));
    tensor::load_generator(session_.generator(valid, rank_));
  }
  record_.settled.store(number);
  ipc::advance(session_.control().life);
}

session::BatchQueue::Filled Runner::next_batch(std::uint64_t number) {
  enter(Phase::data);
  session::BatchQueue::Filled filled{};
  const auto begin = base::now_ns();
  const auto position = queue_.released() + ballot_.micro_batches;
  const auto state =
      queue_.wait(position, filled, config_.runners.spin_us, [&] { return over(number) || stopping(); });
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

Batch Runner::batch_of(session::BatchQueue::Filled filled) const {
  std::vector<NamedTensor> fields;
  fields.reserve(manifest_.fields.size());
  for (const auto& field : manifest_.fields) {
    std::vector<std::int64_t> shape{static_cast<std::int64_t>(filled.elements)};
    shape.insert(shape.end(), field.shape.begin(), field.shape.end());
    auto* data = const_cast<std::byte*>(filled.slot) + field.offset;
    fields.push_back(
        {field.name,
         at::from_blob(data, shape, at::TensorOptions().dtype(static_cast<at::ScalarType>(field.dtype)))});
  }
  return Batch(std::move(fields));
}

void Runner::keep_scalars(const Outputs& outputs, double weight) {
  for (const auto& [name, value] : outputs.scalars) {
    std::uint32_t i = 0;
    while (i < ballot_.scalars && name != ballot_.scalar[i].name) ++i;
    if (i == ballot_.scalars) {
      if (i == session::max_scalars || name.size() >= session::scalar_name_bytes)
        throw ModelError(
            fmt::format("the model returned the number '{}': at most {} are carried, of names below {} bytes",
                        name, session::max_scalars, session::scalar_name_bytes));
      name.copy(ballot_.scalar[i].name, name.size());
      ++ballot_.scalars;
    }
    ballot_.scalar[i].sum += value * weight;
  }
}

void Runner::micro_batch(session::BatchQueue::Filled filled) {
  const auto& request = session_.control().request;
  const double full = double(request.micro_batches) * __builtin_popcount(request.participants);
  const bool partial = request.by_samples != 0 && filled.elements != request.batch_size;
  const double share = partial ? double(filled.elements) / request.batch_size : 1.0;
  enter(Phase::forward);
  at::Tensor loss;
  {
    const model::AutocastScope autocast(config_.runners.autocast == Autocast::bf16);
    const auto outputs = model_->forward(batch_of(filled));
    loss = model::checked_loss(outputs);
    if (loss.scalar_type() != at::kDouble) loss = loss.to(at::kFloat);
    keep_scalars(outputs, share / full);
  }
  loss = loss.div(full);
  if (partial) loss = loss.mul(share);
  const double value = loss.item().toDouble();
  ballot_.loss += value;
  if (!std::isfinite(value)) ballot_.nonfinite = 1;
  enter(Phase::backward);
  take_over_->backward(loss);
  ballot_.samples += filled.elements;
  ballot_.elements += filled.elements;
  ++ballot_.micro_batches;
}

void Runner::compute(std::uint64_t number) {
  const auto& control = session_.control();
  ballot_.parameter_version = control.parameter_version.load();
  if (ballot_.parameter_version != control.request.parameter_version)
    throw NoBatch{Reason::parameters_changed, "the parameters were written while the step began"};
  const auto begin = base::now_ns();
  for (std::uint32_t i = 0; i < control.request.micro_batches && !over(number); ++i) {
    session::BatchQueue::Filled filled{};
    try {
      filled = next_batch(number);
    } catch (const NoBatch& none) {
      // An uneven end: what there is makes a last, shorter step, unless the configuration leaves it out.
      // Element i goes to rank i mod N: where the first rank has nothing, nobody has.
      const bool first = (control.request.participants & ((session::RankMask{1} << rank_) - 1)) == 0;
      if (none.reason != Reason::data_end || config_.data.drop_last || (first && ballot_.micro_batches == 0))
        throw;
      break;
    }
    micro_batch(filled);
    if (filled.elements < control.request.batch_size) break;
  }
  tensor::check_aliases(tensors_, session_, manifest_);
  ballot_.compute_ns = static_cast<std::uint64_t>(base::now_ns() - begin) - ballot_.data_ns;
  if (const auto name = take_over_->nonfinite(); !name.empty() || ballot_.nonfinite != 0) {
    ballot_.nonfinite = 1;
    const auto what = name.empty()
                          ? fmt::format("the loss is {}", ballot_.loss)
                          : fmt::format("the gradient of '{}' is not finite (loss {})", name, ballot_.loss);
    if (control.request.refuse_nonfinite != 0) throw NoBatch{Reason::nonfinite, what};
  }
}

void Runner::vote(std::uint64_t number) {
  enter(Phase::vote);
  if (over(number)) return;
  const auto other = session_.word().index ^ 1;
  tensor::store_buffers(tensors_, manifest_, session_.buffers(other, rank_));
  tensor::store_generator(session_.generator(other, rank_));
  record_.ballot = ballot_;
  session::cast_vote(session_, number, rank_);
}

}  // namespace

int run(const Config& config, ipc::SpawnRequest request) {
  base::start_logging(fmt::format("rank {}", request.rank));
  const base::UniqueFd lifeline = std::move(request.fds.back());
  request.fds.pop_back();
  const auto session =
      session::Session::attach(std::move(request.fds), request.rank, config.runners.protect_parameters);
  auto& control = session.control();
  auto& record = session.record(request.rank);
  try {
    Runner runner(config, session, request.rank, lifeline.get());
    record.life.store(session::Life::ready);
    ipc::advance(control.life);
    runner.serve();
    std::fflush(nullptr);
    _exit(0);  // Nothing here needs a destructor, and torch's take long.
  } catch (const std::exception& error) {
    if (record.reason.load() == Reason::none) {
      const std::string what = error.what();
      record.error[what.copy(record.error, session::text_bytes - 1)] = 0;
      record.reason.store(Reason::exception);
    }
    base::log().error("{}", error.what());
    _exit(exit_failed);
  }
}

}  // namespace accelmgr::runner
