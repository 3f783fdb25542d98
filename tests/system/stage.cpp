#include "stage.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/model.hpp"
#include "base/clock.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

constexpr std::int64_t inputs = 8;
constexpr std::int64_t usual_width = 16;
constexpr std::int64_t wait_slice_ns = 20'000'000;
constexpr double patience_s = 30;  // More than anything here takes; reached only by a test that fails.

ipc::Mapping map_script(int fd) { return {fd, 0, sizeof(Script), ipc::Access::read_write}; }

Script& script_in(const ipc::Mapping& map) { return *reinterpret_cast<Script*>(map.data()); }

ipc::Mapping open_script(const std::string& path) {
  const base::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) throw SystemError("opening " + path, errno);
  return map_script(fd.get());
}

/// The number that an option says.
std::int64_t number(const std::map<std::string, std::string>& options, const std::string& key,
                    std::int64_t otherwise) {
  const auto found = options.find(key);
  return found == options.end() ? otherwise : std::stoll(found->second);
}

/// Children of user code: they do nothing until they are killed, and not for ever, should that fail.
void fork_child(Script& script, std::atomic<pid_t>& child) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(120);
    for (;;) pause();
  }
  child.store(pid);
  ipc::advance(script.heard);
}

/// Regression with all that an aborted step must leave no trace in: BatchNorm's buffers, and dropout's draws
/// from the generator.
class StagedModel final : public Model {
 public:
  explicit StagedModel(const Config& config)
      : map_(open_script(config.model.options.at("stage"))),
        nprocs_(config.nprocs),
        hidden_(number(config.model.options, "hidden", usual_width)) {
    auto& script = script_in(map_);
    for (auto seen = ipc::load(script.told); script.factories_held.load(); seen = ipc::load(script.told)) {
      script.in_factory.store(getpid());
      ipc::advance(script.heard);
      ipc::wait_changed(script.told, seen, wait_slice_ns, 0);
    }
  }

  std::vector<NamedTensor> parameters() override {
    return {{"hidden.weight", hidden_weight_},
            {"norm.weight", norm_weight_},
            {"norm.bias", norm_bias_},
            {"output.weight", output_weight_},
            {"output.bias", output_bias_}};
  }
  std::vector<NamedTensor> buffers() override {
    return {{"norm.running_mean", running_mean_}, {"norm.running_var", running_var_}};
  }
  void train(bool on) override { training_ = on; }

  Outputs forward(const Batch& batch) override {
    const auto target = batch["target"];
    const auto h = at::linear(batch["input"], hidden_weight_);
    const auto norm = at::batch_norm(h, norm_weight_, norm_bias_, running_mean_, running_var_, training_,
                                     /*momentum=*/0.1, /*eps=*/1e-5, /*cudnn_enabled=*/false);
    const auto y = at::linear(at::dropout(norm, 0.3, training_), output_weight_, output_bias_);
    const auto loss = at::mse_loss(y, target);
    // Element i is dealt to device i mod nprocs.
    const int rank = static_cast<int>(batch["index"][0].item<std::int64_t>() % nprocs_);
    switch (act_of(rank)) {
      case Act::throw_exception:
        throw std::runtime_error("the stage collapsed");
      case Act::infinite_loss:
        return {loss.add(std::numeric_limits<double>::infinity()), {}};
      case Act::undefined_gradient:
        return {loss.add(output_bias_.mul(0).sqrt().sum()), {}};
      case Act::vector_loss:
        return {y.sub(target).square(), {}};
      case Act::write_parameter: {
        const at::NoGradGuard no_grad;
        output_bias_.add_(1);
        break;
      }
      case Act::replace_parameter:
        hidden_weight_.set_data(hidden_weight_.detach().clone());
        break;
      case Act::outlive_launcher:
        prctl(PR_SET_PDEATHSIG, 0);
        break;
      case Act::fork_child:
        fork_child(script_in(map_), script_in(map_).child_of_model);
        break;
      default:
        break;
    }
    return {loss, {}};
  }

 private:
  Act act_of(int rank) {
    auto& script = script_in(map_);
    if (const auto once = script.once[rank].exchange(Act::compute); once != Act::compute) return once;
    if (script.act[rank].load() != Act::block) return script.act[rank].load();
    script.blocked[rank].store(true);
    ipc::advance(script.heard);
    for (;;) {
      const auto seen = ipc::load(script.told);
      if (script.act[rank].load() != Act::block) break;
      ipc::wait_changed(script.told, seen, wait_slice_ns, 0);
    }
    script.blocked[rank].store(false);
    return script.act[rank].load();
  }

  ipc::Mapping map_;
  int nprocs_;
  std::int64_t hidden_;
  bool training_ = true;
  at::Tensor hidden_weight_ = at::randn({hidden_, inputs}).requires_grad_();
  at::Tensor norm_weight_ = at::ones({hidden_}).requires_grad_();
  at::Tensor norm_bias_ = at::zeros({hidden_}).requires_grad_();
  at::Tensor output_weight_ = at::randn({1, hidden_}).requires_grad_();
  at::Tensor output_bias_ = at::zeros({1}).requires_grad_();
  at::Tensor running_mean_ = at::zeros({hidden_});
  at::Tensor running_var_ = at::ones({hidden_});
};

class StagedSource final : public BatchSource {
 public:
  explicit StagedSource(const Config& config)
      : map_(open_script(config.model.options.at("stage"))),
        elements_(config.data.elements),
        throw_at_(number(config.data.options, "throw_at", -1)),
        double_at_(number(config.data.options, "double_at", -1)),
        longer_at_(number(config.data.options, "longer_at", -1)),
        fork_at_(number(config.data.options, "fork_at", -1)) {}

  std::span<const FieldSpec> fields() const override { return fields_; }

  bool next(ElementWriter& element) override {
    if (elements_ > 0 && index_ == elements_) return false;
    wait_until_released();
    if (index_ == fork_at_) fork_child(script_in(map_), script_in(map_).child_of_source);
    if (index_ == throw_at_) throw std::runtime_error("drawer 7 is on fire");
    const auto input = at::zeros({index_ == longer_at_ ? inputs + 1 : inputs}, at::kFloat);
    for (std::int64_t i = 0; i < input.numel(); ++i)
      input.mutable_data_ptr<float>()[i] = static_cast<float>(std::sin(double(index_ * inputs + i + 1)));
    element.set(0, index_ == double_at_ ? input.to(at::kDouble) : input);
    element.set(1, input.sum().reshape({1}));
    std::memcpy(element.bytes(2).data(), &index_, sizeof index_);
    ++index_;
    return true;
  }

 private:
  void wait_until_released() {
    auto& script = script_in(map_);
    for (;;) {
      const auto seen = ipc::load(script.told);
      const auto from = script.withheld_from.load();
      if (from == 0 || index_ < from) break;
      if (!script.withheld.exchange(true)) ipc::advance(script.heard);
      ipc::wait_changed(script.told, seen, wait_slice_ns, 0);
    }
    script.withheld.store(false);
  }

  ipc::Mapping map_;
  std::vector<FieldSpec> fields_{
      {"input", at::kFloat, {inputs}}, {"target", at::kFloat, {1}}, {"index", at::kLong, {}}};
  std::int64_t elements_;
  std::int64_t throw_at_;
  std::int64_t double_at_;
  std::int64_t longer_at_;
  std::int64_t fork_at_;
  std::int64_t index_ = 0;
};

const RegisteredModel model(staged,
                            [](const Config& config) { return std::make_unique<StagedModel>(config); });
const RegisteredData source(staged,
                            [](const Config& config) { return std::make_unique<StagedSource>(config); });

}  // namespace

Stage::Stage()
    : fd_(ipc::create_memfd("stage", sizeof(Script))),
      map_(map_script(fd_.get())),
      script_(script_in(map_)) {}

std::string Stage::path() const { return fmt::format("/proc/{}/fd/{}", getpid(), fd_.get()); }

void Stage::tell(int rank, Act act) {
  script_.act[rank].store(act);
  ipc::advance(script_.told);
}

void Stage::tell_once(int rank, Act act) { script_.once[rank].store(act); }

template <class T>
T Stage::wait_until_set(const std::atomic<T>& heard, const std::string& what) {
  const auto deadline = base::Deadline::in_seconds(patience_s);
  for (;;) {
    const auto seen = ipc::load(script_.heard);
    if (const T value = heard.load()) return value;
    if (deadline.passed()) {
      ADD_FAILURE() << what;
      return {};
    }
    ipc::wait_changed(script_.heard, seen, wait_slice_ns, 0);
  }
}

template pid_t Stage::wait_until_set(const std::atomic<pid_t>& heard, const std::string& what);

void Stage::release_factories() {
  script_.factories_held.store(false);
  ipc::advance(script_.told);
}

void Stage::wait_until_blocked(int rank) {
  wait_until_set(script_.blocked[rank], fmt::format("rank {} did not come to its forward()", rank));
}

void Stage::wait_until_withheld() {
  wait_until_set(script_.withheld, "the source did not come to the element that is withheld");
}

void Stage::withhold_elements_from(std::int64_t number) { script_.withheld_from.store(number); }

void Stage::release_elements() {
  script_.withheld_from.store(0);
  ipc::advance(script_.told);
}

Config staged_config(const std::string& stage_path) {
  Config config;
  config.nprocs = staged_ranks;
  config.batch_size_per_device = staged_batch_size;
  config.prefetch = 2 * staged_batch_size;
  config.runners.threads = 1;
  config.runners.on_loss = LossPolicy::fail;
  config.step_timeout = 60;  // Longer than any step here that is to end well, on a loaded machine too.
  config.model.kind = staged;
  config.model.options["stage"] = stage_path;
  config.data.kind = staged;
  return config;
}

Config staged_config(const Stage& stage) { return staged_config(stage.path()); }

}  // namespace accelmgr::test
