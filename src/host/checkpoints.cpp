#include "host/checkpoints.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/interruption.hpp"
#include "base/log.hpp"
#include "checkpoint/run_id.hpp"
#include "checkpoint/storage.hpp"
#include "config/loader.hpp"
#include "tensor/master.hpp"

namespace accelmgr::host {
namespace {

using checkpoint::TensorBytes;
using nlohmann::json;

constexpr double write_timeout_s = 600;  // For an earlier checkpoint: a disk that takes longer hangs.

struct Dtype {
  at::ScalarType torch;
  const char* name;
};
constexpr Dtype dtypes[] = {{at::kByte, "U8"},      {at::kChar, "I8"},    {at::kShort, "I16"},
                            {at::kInt, "I32"},      {at::kLong, "I64"},   {at::kHalf, "F16"},
                            {at::kFloat, "F32"},    {at::kDouble, "F64"}, {at::kBool, "BOOL"},
                            {at::kBFloat16, "BF16"}};

TensorBytes bytes_of(const NamedTensor& extra) {
  const auto& t = extra.tensor;
  for (const auto& dtype : dtypes)
    if (t.defined() && t.is_cpu() && t.is_contiguous() && t.scalar_type() == dtype.torch)
      return {{extra.name, dtype.name, t.sizes().vec(), t.nbytes(), {}},
              static_cast<const std::byte*>(t.const_data_ptr())};
  throw CheckpointError(
      fmt::format("'{}' is a {}; a checkpoint holds contiguous tensors of real numbers on the CPU",
                  extra.name, t.toString()));
}

at::Tensor copy_of(const std::string& name, const checkpoint::Tensor& tensor) {
  for (const auto& dtype : dtypes) {
    if (tensor.dtype != dtype.name) continue;
    auto out = at::empty(tensor.shape, at::TensorOptions().dtype(dtype.torch));
    std::memcpy(out.mutable_data_ptr(), tensor.bytes.data(), tensor.bytes.size());
    return out;
  }
  throw CheckpointError(fmt::format("'{}' has the dtype {}, which torch has not", name, tensor.dtype));
}

bool has_checkpoints(const std::string& directory) {
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(directory, none))
    if (entry.path().filename().string().starts_with("step-")) return true;
  return false;
}

json parsed(const std::string& text) {
  auto value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) throw UsageError("CheckpointExtras::json is no JSON object");
  return value;
}

/// The checkpoint that `config` asks to go on from, wholly checked; none for a new run. `latest` of a
/// directory that has none begins a new run. Throws CheckpointError.
std::optional<Resumed> find_resumed(const CheckpointConfig& config) {
  if (config.resume.empty()) return std::nullopt;
  Resumed resumed;
  const auto open = [&] {
    if (config.resume != "latest") return checkpoint::open(config.resume);
    return checkpoint::open_latest(config.directory, [&](const std::string& why) {
      base::log().info("{}", why);
      resumed.refused.push_back(why);
    });
  };
  if (config.resume == "latest" && !has_checkpoints(config.directory)) {
    base::log().warn("checkpoint.resume: there is no checkpoint in '{}' yet; a new run begins",
                     config.directory);
    return std::nullopt;
  }
  const auto checkpoint = open();
  resumed.path = std::filesystem::absolute(checkpoint.path).string();
  resumed.step = checkpoint.step;
  for (const auto& name : checkpoint.training.names())
    if (!checkpoint::is_of_session(name))
      resumed.tensors.push_back({name, copy_of(name, checkpoint.training.tensor(name))});
  resumed.json = checkpoint.state.value("host", json::object()).dump();
  resumed.run_id = checkpoint::run_id_of(checkpoint.state);
  resumed.configuration = checkpoint.state.value("configuration", "");
  return resumed;
}

}  // namespace

Run::Run(const CheckpointConfig& config, bool lock_now) {
  if (lock_now && !config.directory.empty()) lock.emplace(config.directory);
  resumed = find_resumed(config);
  if (resumed)
    id = resumed->run_id;
  else if (lock && !config.resume.empty())
    id = lock->killed_run();
  if (id.empty()) id = checkpoint::new_run_id();
  if (lock) lock->set_run(id);
}

void Run::take_directory(const std::string& directory) {
  if (!lock) {
    lock.emplace(directory);
    lock->set_run(id);
  }
  const bool known = !resumed || !resumed->run_id.empty();
  if (alone_ || !known || !std::filesystem::exists(directory)) return;
  const auto others =
      checkpoint::as_checkpoint_error([&] { return checkpoint::checkpoints_of_other_runs(directory, id); });
  if (!others.empty())
    throw CheckpointError(
        fmt::format("'{}' is of another run, whose checkpoints this one would replace: go on from it "
                    "(checkpoint.resume), take another directory (checkpoint.directory), or remove it",
                    others.front().path.string()));
  alone_ = true;
}

void Checkpoints::Staging::reserve(std::uint64_t bytes) {
  if (map && map.size() >= bytes) return;
  map = {};
  fd.reset();
  if (const auto available = ipc::memory_available(); bytes > available.bytes)
    throw SessionError(
        fmt::format("a checkpoint needs {} bytes of memory as a staging area, {} are available ({})", bytes,
                    available.bytes, available.limited_by));
  fd = ipc::create_memfd("accelmgr-checkpoint", bytes);
  map = ipc::Mapping(fd.get(), 0, bytes, ipc::Access::read_write);
}

std::uint64_t Checkpoints::Staging::fill(const std::vector<TensorBytes>& tensors) {
  std::vector<checkpoint::TensorDescription> descriptions;
  for (const auto& tensor : tensors) descriptions.push_back(tensor.description);
  const checkpoint::SafetensorsLayout layout(std::move(descriptions));
  reserve(layout.total_bytes());
  layout.write_header(map.data());
  for (std::size_t i = 0; i < tensors.size(); ++i)
    std::memcpy(map.data() + layout.offset(i), tensors[i].data, tensors[i].description.bytes);
  return layout.total_bytes();
}

void Checkpoints::wait_for_earlier() {
  const auto deadline = base::Deadline::in_seconds(write_timeout_s);
  for (take_in(); under_way_; take_in()) {
    if (processes_.manager_ended()) throw SessionError("save_checkpoint(): the manager process is gone");
    if (deadline.passed())
      throw SessionError(fmt::format("save_checkpoint(): the checkpoint of step {} is not written after {} s",
                                     under_way_->step, write_timeout_s));
    if (base::interrupted()) throw SessionError("save_checkpoint(): interrupted; nothing was saved");
    processes_.hears_within(deadline);
  }
}

base::UniqueFd Checkpoints::describe(const CheckpointExtras& extras, std::uint64_t model_bytes,
                                     std::uint64_t training_bytes) const {
  json description{{"metric", nullptr},
                   {"directory", extras.directory},
                   {"model_bytes", model_bytes},
                   {"training_bytes", training_bytes},
                   {"state",
                    {{"session", checkpoint::run_state(session_)},
                     {"seeds", {{"seed_base", config_.seed_base}, {"data.seed", config_.data.seed}}},
                     {"configuration", config::to_yaml(config_)},
                     {checkpoint::run_id_key, run_.id},
                     {"host", parsed(extras.json)}}}};
  if (extras.metric && std::isfinite(*extras.metric)) description["metric"] = *extras.metric;
  const auto text = description.dump(-1, ' ', false, json::error_handler_t::replace);
  Staging memory;
  memory.reserve(text.size());
  std::memcpy(memory.map.data(), text.data(), text.size());
  return std::move(memory.fd);
}

double Checkpoints::save(const CheckpointExtras& extras) {
  if (config_.checkpoint.directory.empty() && extras.directory.empty())
    throw UsageError("save_checkpoint() without checkpoint.directory: there is nowhere to write");
  const auto begin = base::now_ns();
  if (extras.directory.empty()) run_.take_directory(config_.checkpoint.directory);
  wait_for_earlier();
  auto training = checkpoint::training_tensors(session_, manifest_);
  for (const auto& extra : extras.tensors) training.push_back(bytes_of(extra));
  tensor::gather_shared_parameters(session_, manifest_);
  const auto model_bytes = model_.fill(checkpoint::model_tensors(session_, manifest_));
  const auto training_bytes = training_.fill(training);
  const auto step = session_.counters(session_.word().index).steps;
  protocol::Save save;
  save.step = step;
  save.model = base::duplicate(model_.fd.get());
  save.training = base::duplicate(training_.fd.get());
  save.description = describe(extras, model_bytes, training_bytes);
  if (run_.lock) save.lock = base::duplicate(run_.lock->fd());
  processes_.send(std::move(save));
  under_way_.emplace();
  under_way_->step = step;
  under_way_->copy_ms = double(base::now_ns() - begin) / 1e6;
  base::log().info("a checkpoint of step {} is handed to the manager: {} bytes, copied in {:.1f} ms", step,
                   model_bytes + training_bytes, under_way_->copy_ms);
  return under_way_->copy_ms;
}

void Checkpoints::take_in() {
  for (auto& saved : processes_.take_saved()) {
    if (!under_way_) continue;
    under_way_->path = std::move(saved.path);
    under_way_->bytes = saved.bytes;
    under_way_->write_ms = saved.write_ms;
    under_way_->error = std::move(saved.error);
    under_way_->warnings = std::move(saved.warnings);
    done_.push_back(std::move(*under_way_));
    under_way_.reset();
  }
}

void Checkpoints::manager_lost() {
  take_in();
  if (!under_way_) return;
  under_way_->error = "the manager process ended before the checkpoint was written";
  done_.push_back(std::move(*under_way_));
  under_way_.reset();
}

std::vector<CheckpointWritten> Checkpoints::written(base::Deadline deadline) {
  for (take_in(); under_way_ && !deadline.passed(); take_in()) {
    if (processes_.manager_ended()) {
      manager_lost();
      break;
    }
    if (base::interrupted()) throw SessionError("checkpoints_written(): interrupted; nothing is lost");
    processes_.hears_within(deadline);
  }
  return std::exchange(done_, {});
}

}  // namespace accelmgr::host
