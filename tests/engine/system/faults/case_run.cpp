#include "case_run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <regex>
#include <string_view>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "captured_errors.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "engine/system/stage.hpp"
#include "engine/system/staged_run.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t disturbed_step = 2;
// Slices of several chunks. A chunk has 4 KiB if the gradients are accumulated, and 1 MiB if they are
// overwritten.
constexpr const char *width = "8192", *overwrite_width = "98304";
// A checkpoint reaches FaultPhase::checkpoint after each of three files, and before the rename.
constexpr int reaches_of_a_checkpoint = 4;
constexpr double hang_timeout_s = 1.5;
constexpr double reduction_timeout_s = 3;
constexpr double start_timeout_s = 3;
constexpr double step_timeout_s = 60;
constexpr double source_timeout_s = 3;  // For a step whose elements never come.
// Added to a deadline: the longest time until another process has finished a committed reduction, and until a
// start has been ended by force.
constexpr double recovery_s = 30, end_s = 60;
constexpr double checkpoint_s = 20;

std::string rank_text(int rank) { return rank == faults::manager_rank ? "manager" : std::to_string(rank); }

/// The fault in the syntax of engine/faults/plan.hpp.
std::string text_of(const FaultCase& c) {
  const auto& place = c.place;
  std::string when = fmt::format("step={}", disturbed_step);  // The threads of the manager have no step.
  if (place.phase == base::FaultPhase::init) when = "step=any";
  // In the manager: the second element that the step needs, or the first file of the second checkpoint.
  constexpr int elements_of_a_step = staged_ranks * staged_batch_size;
  if (place.order == Order::source_is_waited_for) when = fmt::format("occurrence={}", elements_of_a_step + 2);
  if (place.order == Order::checkpoint_strikes_first)
    when = fmt::format("occurrence={}", reaches_of_a_checkpoint + 1);
  return fmt::format("rank={} {} phase={} fault={}", rank_text(place.rank), when,
                     faults::name_of(place.phase), c.fault);
}

/// A harmless fault. When it strikes, the log tells how far a rank has come.
std::string marker_of(const FaultCase& c) {
  const auto step = fmt::format("step={}", disturbed_step);
  if (c.place.order == Order::source_is_waited_for) return "rank=any " + step + " phase=data fault=slow:1";
  if (c.place.order == Order::victim_votes_last) return "rank=0 " + step + " phase=voted fault=slow:1";
  return "";
}

constexpr session::Update update{
    .kind = session::Update::Kind::adamw,
    .clip_norm = 1,
    .groups = {{.learning_rate = 1e-3, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .epsilon = 1e-8}}};

std::uint64_t digest_of(const client::Handle& manager) {
  std::uint64_t digest = 0;
  const auto add = [&](std::string_view bytes) {
    digest = digest * 0x9e3779b97f4a7c15ULL + std::hash<std::string_view>{}(bytes);
  };
  for (const auto& list : {parameters_of(manager), gradients_of(manager), buffers_of(manager)})
    for (const auto& tensor : list)
      add({reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()});
  const auto& control = manager.view().control();
  const auto moments = static_cast<std::size_t>(control.moments_used.load());
  add({reinterpret_cast<const char*>(manager.view().moments()),
       moments * manager.session()->header().bytes.trained});
  const auto statistics = manager.statistics();
  add(fmt::format("{} {} {} {}", statistics.steps, statistics.samples, statistics.elements,
                  manager.updates(0)));
  return digest;
}

/// The descriptors of this process, and its mappings of memfds.
struct Held {
  std::ptrdiff_t descriptors = 0;
  int mappings = 0;
};

Held held() {
  Held now;
  now.descriptors = std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find("/memfd:") != std::string::npos) ++now.mappings;
  return now;
}

/// Runs one case with this process as the host.
class CaseRun {
 public:
  explicit CaseRun(const FaultCase& c) : case_(c), config_(config()) {}
  CaseSeen run();

 private:
  Config config() const;
  void start_and_step();
  void start_refused(const RunnerError& error);
  void step_three_times(StagedRun& run);
  StepSeen step(client::Handle& manager, double timeout_s);
  double timeout_s() const;
  void hold_back(StagedRun& run);
  void let_go();
  std::string struck() const { return "injecting a fault: " + text_of(case_); }
  void write_checkpoint(client::Handle& manager);
  void check_checkpoints() const;

  bool at(Order order) const { return case_.place.order == order; }
  bool disturbed() const { return !case_.fault.empty(); }

  const FaultCase& case_;
  CapturedErrors errors_;
  TemporaryFolder directory_;
  Stage stage_;
  Config config_;
  CaseSeen seen_;
  std::vector<std::string> ended_;
};

Config CaseRun::config() const {
  auto config = staged_config(stage_);
  config.model.kind = case_.model;
  config.model.options["hidden"] = case_.place.accumulate ? width : overwrite_width;
  config.runners.on_loss = case_.policy;
  config.checkpoint.directory = directory_.path();
  if (!disturbed()) return config;
  config.faults = {text_of(case_)};
  if (const auto marker = marker_of(case_); !marker.empty()) config.faults.push_back(marker);
  if (!is_silent(case_)) return config;
  const bool in_manager = case_.place.rank == faults::manager_rank;
  if (case_.place.phase == base::FaultPhase::init) config.start_timeout = start_timeout_s;
  // Only waits that nothing else ends get such a short limit: on a loaded machine healthy runners may exceed
  // it.
  const bool in_reduction =
      at(Order::victim_votes_first) || (is_committed(case_) && case_.place.phase != base::FaultPhase::close);
  if (in_reduction)
    config.runners.reduction_timeout = reduction_timeout_s;
  else if (!in_manager)
    config.runners.hang_timeout = hang_timeout_s;
  return config;
}

CaseSeen CaseRun::run() {
  start_and_step();
  expect_nothing_left();
  errors_.finish();
  if (at(Order::checkpoint_strikes_first) && disturbed()) check_checkpoints();
  for (auto& loss : errors_.losses()) ended_.push_back(std::move(loss));
  seen_.ended = ended_.empty() ? "-" : fmt::format("{}", fmt::join(ended_, "; "));
  if (testing::Test::HasFailure())
    std::printf("%s said:\n%s", name_of(case_).c_str(), errors_.text().c_str());
  return seen_;
}

void CaseRun::start_and_step() {
  const auto begin = base::now_ns();
  const auto note_time = [&] { seen_.report_ms = double(base::now_ns() - begin) / 1e6; };
  if (at(Order::source_is_waited_for))
    stage_.withhold_elements_from(disturbed() ? std::int64_t{staged_ranks} * staged_batch_size : 0);
  try {
    StagedRun run(config_);
    note_time();
    step_three_times(run);
  } catch (const RunnerError& error) {
    note_time();
    start_refused(error);
  }
}

void CaseRun::start_refused(const RunnerError& error) {
  EXPECT_LT(seen_.report_ms, (config_.start_timeout + end_s) * 1e3);
  seen_.disturbed.status = "RunnerError";
  static const std::regex loss(R"(^(runner \d+) (exit code \d+|killed by signal \d+ \(\w+\)) in phase)");
  const std::string what = error.what();
  if (std::smatch match; std::regex_search(what, match, loss))
    ended_.push_back(match[1].str() + ": " + match[2].str());
}

void CaseRun::step_three_times(StagedRun& run) {
  auto& manager = run.manager();
  if (at(Order::checkpoint_strikes_first)) write_checkpoint(manager);
  EXPECT_EQ(step(manager, step_timeout_s).status, "ok") << "the first step, which is undisturbed";
  seen_.states[0] = digest_of(manager);

  hold_back(run);
  const bool starts_disturbed = case_.place.phase == base::FaultPhase::init;
  auto second = std::async(std::launch::async, [&] {
    const auto begin = base::now_ns();
    seen_.disturbed = step(manager, timeout_s());
    if (!starts_disturbed) seen_.report_ms = double(base::now_ns() - begin) / 1e6;
  });
  let_go();
  second.get();
  seen_.states[1] = digest_of(manager);

  // Waits for the loss, so that the next step always finds it at its beginning.
  if (ends_process(case_) && case_.place.rank != faults::manager_rank && disturbed()) errors_.wait_for_loss();
  seen_.next = step(manager, timeout_s());
  seen_.states[2] = digest_of(manager);
}

double CaseRun::timeout_s() const {
  return at(Order::source_is_waited_for) && is_silent(case_) ? source_timeout_s : step_timeout_s;
}

StepSeen CaseRun::step(client::Handle& manager, double timeout_s) {
  const auto begin = base::now_ns();
  const StepOptions options{.timeout_s = timeout_s, .accumulate = case_.place.accumulate};
  const auto result = case_.place.updates ? manager.step(options, update) : manager.step(options);
  EXPECT_LT(double(base::now_ns() - begin) / 1e9, timeout_s + recovery_s);
  if (result.status == StepStatus::manager_lost && ended_.empty())
    for (const auto& cause : result.causes) ended_.push_back("manager: " + cause.exit);
  return {to_string(result.status), result.counted, result.tries};
}

void CaseRun::hold_back(StagedRun& run) {
  if (!disturbed()) return;
  if (at(Order::victim_votes_first)) stage_.tell(0, Act::block);
  if (at(Order::victim_votes_last)) stage_.tell(1, Act::block);
  if (!at(Order::checkpoint_strikes_first)) return;
  run.manager().save_checkpoint({});
  errors_.wait_for(struck());
  const bool waits = ends_process(case_);
  EXPECT_TRUE(!waits || ipc::wait_ended(run.processes().manager.get(), soon()));
}

void CaseRun::let_go() {
  if (!disturbed()) return;
  if (at(Order::victim_votes_first)) {
    ends_process(case_) ? errors_.wait_for_loss() : errors_.wait_for(struck());
    stage_.tell(0, Act::compute);
  } else if (at(Order::victim_votes_last)) {
    errors_.wait_for("injecting a fault: " + marker_of(case_));
    stage_.tell(1, Act::compute);
  } else if (at(Order::source_is_waited_for)) {
    errors_.wait_for("injecting a fault: " + marker_of(case_), staged_ranks);
    stage_.release_elements();
  }
}

void CaseRun::write_checkpoint(client::Handle& manager) {
  manager.save_checkpoint({});
  const auto written = manager.checkpoints_written(checkpoint_s);
  ASSERT_EQ(written.size(), 1U);
  EXPECT_EQ(written[0].error, "");
}

// The checkpoint before must be whole and the latest, unless the disturbed one was completed.
void CaseRun::check_checkpoints() const {
  const auto latest = checkpoint::open_latest(directory_.path(), [](const auto&, const std::string& why) {
    ADD_FAILURE() << "a checkpoint that is not whole has the name of one that is: " << why;
  });
  EXPECT_EQ(latest.step, case_.fault == "slow:200" ? 1U : 0U);
}

}  // namespace

CaseSeen run_case(const FaultCase& c) {
  const auto before = held();
  CaseSeen seen;
  {
    CaseRun run(c);
    seen = run.run();
  }
  const auto after = held();
  EXPECT_EQ(after.descriptors, before.descriptors) << "descriptors are left";
  EXPECT_EQ(after.mappings, before.mappings) << "mappings of shared memory are left";
  return seen;
}

}  // namespace accelmgr::test
