#include "engine/client/checkpoints.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "base/clock.hpp"
#include "base/config/loader.hpp"
#include "base/interruption.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/checkpoint/cleanup.hpp"
#include "engine/checkpoint/run_id.hpp"
#include "engine/checkpoint/safetensors_header.hpp"
#include "engine/checkpoint/state_file.hpp"
#include "engine/checkpoint/storage.hpp"

namespace accelmgr::client {
namespace {

using checkpoint::TensorBytes;
using nlohmann::json;

TensorBytes bytes_of(const Value& extra) {
  const std::string name(checkpoint::name_in_file(extra.dtype));
  const auto bytes = checkpoint::tensor_bytes(fmt::format("'{}'", extra.name), name, extra.shape);
  return {{extra.name, name, extra.shape, bytes, {}}, extra.data};
}

OwnedValue copy_of(const Value& value, std::size_t bytes) {
  OwnedValue copy{value.name, value.dtype, value.shape};
  copy.data.reset(new std::byte[bytes]);  // make_shared() would align it only for bytes.
  std::memcpy(copy.data.get(), value.data, bytes);
  return copy;
}

/// The tensors of the file that are a host's; they point into it.
std::vector<Value> host_tensors(const checkpoint::SafetensorsFile& training) {
  std::vector<Value> values;
  for (const auto& name : training.names()) {
    if (checkpoint::is_of_session(name)) continue;
    const auto& tensor = training.tensor(name);
    // value() cannot throw: SafetensorsFile refuses files with other dtypes.
    values.push_back(
        {name, checkpoint::dtype_in_file(tensor.dtype).value(), tensor.shape, tensor.bytes.data()});
  }
  return values;
}

json host_json(const json& run) { return run.value("host", json::object()); }
std::uint64_t host_step(const json& run, std::uint64_t step) { return run.value("host_step", step); }

/// `run`: the state of the checkpoint of `step` at `path`.
ResumedFrom resumed_from(const std::string& path, std::uint64_t step, const json& run,
                         const checkpoint::SafetensorsFile& training) {
  ResumedFrom resumed;
  resumed.path = path;
  resumed.step = step;
  for (const auto& value : host_tensors(training))
    resumed.tensors.push_back(copy_of(value, training.tensor(value.name).bytes.size()));
  resumed.json = host_json(run).dump();
  resumed.run_id = checkpoint::run_id_of(run);
  resumed.configuration = run.value("configuration", "");
  resumed.extras_step = host_step(run, step);
  return resumed;
}

bool has_checkpoints(const std::string& directory) {
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(directory, none))
    if (entry.path().filename().string().starts_with("step-")) return true;
  return false;
}

json parsed(const std::string& text) {
  auto value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) throw UsageError("save_checkpoint(): `json` is not a JSON object");
  return value;
}

/// Opens and checks the checkpoint that `config` asks to go on from. Returns nullopt for a new run, also if
/// `latest` is asked for and the directory has no checkpoint. `unreadable` gets the folders of later ones
/// that are not good. Throws CheckpointError.
std::optional<ResumedFrom> find_resumed(const CheckpointConfig& config,
                                        std::vector<std::filesystem::path>& unreadable) {
  if (config.resume.empty()) return std::nullopt;
  std::vector<std::string> refused;
  const auto open = [&] {
    if (config.resume != "latest") return checkpoint::open(config.resume);
    return checkpoint::open_latest(config.directory, [&](const auto& folder, const std::string& why) {
      base::log().warn("{}", why);
      refused.push_back(why);
      unreadable.push_back(folder);
    });
  };
  if (config.resume == "latest" && !has_checkpoints(config.directory)) {
    base::log().warn("checkpoint.resume: there is no checkpoint in '{}' yet; a new run begins",
                     config.directory);
    return std::nullopt;
  }
  const auto checkpoint = open();
  auto resumed = resumed_from(std::filesystem::absolute(checkpoint.path).string(), checkpoint.step,
                              checkpoint.state, checkpoint.training);
  resumed.refused = std::move(refused);
  return resumed;
}

}  // namespace

ResumedFrom resumed_from(const checkpoint::HostFiles& files) {
  const auto state = checkpoint::as_checkpoint_error(
      [&] { return checkpoint::read_state_file(files.state.get(), files.path); });
  return resumed_from(files.path, state.step, state.run,
                      checkpoint::SafetensorsFile(files.training.get(), files.path));
}

Run::Run(const CheckpointConfig& config, bool lock_now) {
  if (lock_now && !config.directory.empty()) lock.emplace(config.directory);
  resumed = find_resumed(config, unreadable_);
  if (lock) set_unreadable_aside();
  if (resumed)
    id = resumed->run_id;
  else if (lock && !config.resume.empty())
    id = lock->killed_run();
  if (id.empty()) id = checkpoint::new_run_id();
  if (lock) lock->set_run(id);
}

void Run::set_unreadable_aside() {
  for (const auto& folder : std::exchange(unreadable_, {})) {
    try {
      const auto aside = checkpoint::set_unreadable_aside(folder);
      base::log().warn("the run goes on from step {}; '{}' is kept as '{}'", resumed->step, folder.string(),
                       aside.string());
    } catch (const SystemError& error) {
      throw CheckpointError(error.what());
    }
  }
}

void Run::take_directory(const std::string& directory) {
  if (tenure_ == protocol::Tenure::of_service) return;
  if (lock && !lock->is_held()) {
    base::log().warn("'{}' was removed; it is made and locked anew", directory);
    lock.reset();
    alone_ = false;
  }
  if (!lock) {
    lock.emplace(directory);
    lock->set_run(id);
    set_unreadable_aside();
  }
  const bool known = !resumed || !resumed->run_id.empty();
  if (alone_ || !known || !std::filesystem::exists(directory)) return;
  const auto others =
      checkpoint::as_checkpoint_error([&] { return checkpoint::checkpoints_of_other_runs(directory, id); });
  if (!others.empty())
    throw CheckpointError(
        fmt::format("'{}' is of another run, whose checkpoints this run would replace: resume from it "
                    "(checkpoint.resume), use another directory (checkpoint.directory), or remove it",
                    others.front().path.string()));
  alone_ = true;
}

void Checkpoints::Staging::reserve(std::uint64_t bytes) {
  if (map && map.size() >= bytes) return;
  map = {};
  fd.reset();
  if (const auto available = ipc::memory_available(); bytes > available.bytes)
    throw SessionError(
        fmt::format("a checkpoint needs {} bytes of memory as a staging area, but {} are available ({})",
                    bytes, available.bytes, available.limited_by));
  fd = ipc::create_memfd("accelmgr-checkpoint", bytes);
  map = ipc::Mapping(fd.get(), 0, bytes, ipc::Access::read_write);
}

std::uint64_t Checkpoints::Staging::fill(const std::vector<TensorBytes>& tensors) {
  std::vector<checkpoint::TensorDescription> descriptions;
  descriptions.reserve(tensors.size());
  for (const auto& tensor : tensors) descriptions.push_back(tensor.description);
  const checkpoint::SafetensorsLayout layout(std::move(descriptions));
  reserve(layout.total_bytes());
  layout.write_header(map.data());
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].store(map.data() + layout.offset(i));
  return layout.total_bytes();
}

void Checkpoints::wait_for_earlier() {
  const auto deadline = base::Deadline::in_seconds(timing::checkpoint_write_s);
  for (take_in(); under_way_; take_in()) {
    if (link_.manager_ended()) throw SessionError("save_checkpoint(): the manager process is gone");
    if (deadline.passed())
      throw SessionError(
          fmt::format("save_checkpoint(): the checkpoint of step {} was not written within {} s",
                      under_way_->step, timing::checkpoint_write_s));
    if (base::interrupted()) throw SessionError("save_checkpoint(): interrupted; nothing was saved");
    link_.hears_soon(deadline);
  }
}

base::UniqueFd Checkpoints::describe(const Extras& extras, std::uint64_t model_bytes,
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
  if (extras.step) description["state"]["host_step"] = *extras.step;
  if (extras.metric && std::isfinite(*extras.metric)) description["metric"] = *extras.metric;
  const auto text = base::json_text(description);
  Staging memory;
  memory.reserve(text.size());
  std::memcpy(memory.map.data(), text.data(), text.size());
  return std::move(memory.fd);
}

double Checkpoints::save(const Extras& extras) {
  if (config_.checkpoint.directory.empty() && extras.directory.empty())
    throw UsageError("save_checkpoint() was called without checkpoint.directory: there is nowhere to write");
  const auto begin = base::now_ns();
  const std::uint64_t step = session_.counters(session_.word().index).steps;
  const session::SpanScope span(spans_, session::Activity::copy_checkpoint, step, begin);
  if (extras.directory.empty()) run_.take_directory(config_.checkpoint.directory);
  wait_for_earlier();
  auto training = checkpoint::training_tensors(session_, manifest_);
  for (const auto& extra : extras.tensors) training.push_back(bytes_of(extra));
  const auto model_bytes = model_.fill(checkpoint::model_tensors(session_, manifest_));
  const auto training_bytes = training_.fill(training);
  protocol::Save save;
  save.step = step;
  save.model = base::duplicate(model_.fd.get());
  save.training = base::duplicate(training_.fd.get());
  save.description = describe(extras, model_bytes, training_bytes);
  if (run_.lock) save.lock = base::duplicate(run_.lock->fd());
  link_.send(std::move(save));
  under_way_.emplace();
  under_way_->step = step;
  under_way_->copy_ms = double(base::now_ns() - begin) / 1e6;
  base::log().info("a checkpoint of step {} is handed to the manager: {} bytes, copied in {:.1f} ms", step,
                   model_bytes + training_bytes, under_way_->copy_ms);
  return under_way_->copy_ms;
}

double Checkpoints::save_with(const checkpoint::HostFiles* files, const std::string& directory) {
  std::optional<checkpoint::SafetensorsFile> training;
  Extras extras;
  if (files != nullptr) try {
      const auto state = checkpoint::read_state_file(files->state.get(), files->path);
      training.emplace(files->training.get(), files->path);
      extras.tensors = host_tensors(*training);
      extras.json = host_json(state.run).dump();
      extras.step = host_step(state.run, state.step);
    } catch (const Error& error) {
      base::log().warn("a checkpoint is written without what the last host has saved: {}", error.what());
      extras = {};
    }
  extras.directory = directory;
  return save(extras);
}

void Checkpoints::take_in() {
  for (auto& saved : link_.take_saved()) {
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

void Checkpoints::manager_lost(const std::string& why) {
  take_in();
  if (!under_way_) return;
  under_way_->error = why;
  done_.push_back(std::move(*under_way_));
  under_way_.reset();
}

void Checkpoints::finish(base::Deadline deadline) {
  for (take_in(); under_way_ && !deadline.passed(); take_in()) {
    if (link_.manager_ended()) return manager_lost();
    if (base::interrupted())
      throw SessionError("the wait for a checkpoint was interrupted; it is still being written");
    link_.hears_soon(deadline);
  }
}

std::vector<CheckpointWritten> Checkpoints::written(base::Deadline deadline) {
  finish(deadline);
  return std::exchange(done_, {});
}

}  // namespace accelmgr::client
