// Measures what one of two runners does after the commit of an inner step whose update the session makes: it
// reduces its half of the gradients, and updates its half of the parameters with AdamW. The peer reduces the
// same half, and calls torch's fused AdamW for the same half of the parameters; both with and without
// clipping. One thread; both take turns in one process.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "engine/session/parameter_update.hpp"
#include "engine/session/reduction.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;

constexpr int ranks = 2;
constexpr std::uint64_t tensors = 16;

constexpr session::UpdateGroup adamw{
    .learning_rate = 1e-3, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8};

double ms_since(std::int64_t begin_ns) { return double(base::now_ns() - begin_ns) / 1e6; }

session::Manifest manifest_of(std::uint64_t parameters) {
  session::Manifest manifest;
  for (std::uint64_t i = 0; i < tensors; ++i) {
    const auto count = parameters / tensors;
    manifest.tensors.push_back({.name = std::to_string(i),
                                .aliases = {},
                                .shape = {static_cast<std::int64_t>(count)},
                                .count = count,
                                .group = session::Group::decay});
  }
  return manifest;
}

session::Session session_of(session::Manifest& manifest) {
  session::Extent extent{.ranks = ranks, .bytes = manifest.place_tensors()};
  extent.tensors = manifest.tensors.size();
  extent.manifest_bytes = session::manifest_bytes(manifest);
  auto session = session::Session::create(extent, ranks, 1);
  session.allocate_moments(session::Moments::both);
  const auto fill = [](std::byte* memory, std::uint64_t bytes, float scale) {
    auto* numbers = reinterpret_cast<float*>(memory);
    for (std::uint64_t i = 0; i < bytes / sizeof(float); ++i) numbers[i] = scale * float(i % 1009 + 1) / 1009;
  };
  const auto& bytes = session.header().bytes;
  fill(session.parameters(), bytes.parameters, 1);
  fill(session.moments(), 2 * bytes.trained, 1e-4F);
  for (int rank = 0; rank < ranks; ++rank) fill(session.slab(rank), bytes.slab, 1e-2F);
  return session;
}

class Contest {
 public:
  explicit Contest(std::uint64_t parameters)
      : manifest_(manifest_of(parameters)),
        session_(session_of(manifest_)),
        reduction_(session_, manifest_),
        update_(session_, manifest_) {
    const auto half = static_cast<std::int64_t>(session_.header().bytes.trained / sizeof(float) / ranks);
    for (auto* moment : {&first_, &second_}) *moment = at::full({half}, 1e-4F);
  }

  /// Time of rank 0, in ms.
  double ours(double clip_norm) {
    return after_commit(session::Applies::session, clip_norm, [&](std::uint64_t attempt) {
      reduction_.finish_slice(0, attempt);
      const auto first = base::now_ns();
      reduction_.finish_slice(1, attempt);
      others_ns_ += base::now_ns() - first;
      update_.finish_slice(0, attempt);
    });
  }
  double torch(double clip_norm) {
    return after_commit(session::Applies::host, 0, [&](std::uint64_t attempt) {
      reduction_.finish_slice(0, attempt);
      const auto half = static_cast<std::int64_t>(session_.header().bytes.trained / sizeof(float) / ranks);
      const auto view = [half](std::byte* memory) { return at::from_blob(memory, {half}, at::kFloat); };
      const auto gradients = view(session_.gradients());
      std::optional<at::Tensor> scale;
      if (clip_norm > 0) {  // The norm of the other half would come from the other runner.
        const auto norms = at::linalg_vector_norm(gradients.view({-1, 4096}), 2, {1});
        const auto norm = std::sqrt(2.0) * at::linalg_vector_norm(norms).item<double>();
        scale = at::full({}, std::max(1.0, norm / clip_norm), at::kFloat);
      }
      at::_fused_adamw_(view(session_.parameters()), gradients, first_, second_, {}, at::full({}, 3.0),
                        adamw.learning_rate, adamw.beta1, adamw.beta2, adamw.weight_decay, adamw.epsilon,
                        /*amsgrad=*/false, /*maximize=*/false, scale, {});
    });
  }

 private:
  template <class Work>
  double after_commit(session::Applies applies, double clip_norm, Work work) {
    const auto attempt =
        session::open_attempt(session_, {.participants = session::all_ranks(ranks),
                                         .shares = session::even_shares(1),
                                         .batch_size = 1,
                                         .applies = applies,
                                         .update = {.clip_norm = clip_norm, .groups = {adamw}}});
    for (int rank = 0; rank < ranks; ++rank) {
      for (auto& tag : session_.tags(rank)) tag.store(attempt);
      reduction_.reset_cursor(rank, attempt);
      session_.record(rank).ballot.micro_batches = 1;
      session::cast_vote({session_, rank}, attempt);
    }
    others_ns_ = 0;
    const auto begin = base::now_ns();
    work(attempt);
    const auto ms = ms_since(begin + others_ns_);
    for (int rank = 0; rank < ranks; ++rank) reduction_.finish_slice(rank, attempt);
    if (applies == session::Applies::session)
      for (int rank = 0; rank < ranks; ++rank) update_.finish_slice(rank, attempt);
    if (!session::close_if_over(session_, attempt))
      throw std::runtime_error("update: the attempt is not over");
    return ms;
  }

  session::Manifest manifest_;
  session::Session session_;
  session::Reduction reduction_;
  session::ParameterUpdate update_;
  at::Tensor first_, second_;   ///< Moments of torch's optimizer, where an optimizer of a host has them.
  std::int64_t others_ns_ = 0;  ///< Of the time of `work`, what the other rank does.
};

void measure(std::uint64_t millions, int rounds) {
  Contest contest(millions << 20);
  for (const double clip_norm : {0.0, 1.0}) {
    std::vector<double> ours, torch;
    for (int round = -1; round < rounds; ++round) {
      const double one = contest.ours(clip_norm), other = contest.torch(clip_norm);
      if (round < 0) continue;  // It touches memory for the first time.
      ours.push_back(one);
      torch.push_back(other);
    }
    const auto in_case = fmt::format("{}M{}", millions, clip_norm > 0 ? " clipped" : "");
    bench::emit("ours", in_case, "time", bench::median(ours), "ms");
    bench::emit("torch", in_case, "time", bench::median(torch), "ms");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = bench::parse_quick(argc, argv);
  return bench::exit_code_of([&] {
    at::set_num_threads(1);
    const at::NoGradGuard no_grad;
    for (const std::uint64_t millions : {1, 17, 64}) measure(millions, quick ? 5 : 15);
    if (!quick) measure(256, 5);
  });
}
