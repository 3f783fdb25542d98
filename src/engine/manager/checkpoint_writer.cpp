#include "engine/manager/checkpoint_writer.hpp"

#include <fmt/format.h>

#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>
#include <thread>

#include "accelmgr/errors.hpp"
#include "base/checked_fields.hpp"
#include "base/clock.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/user_forks.hpp"
#include "base/log.hpp"
#include "engine/checkpoint/folder.hpp"

namespace accelmgr::manager {
namespace {

ipc::Mapping map(const base::UniqueFd& fd) {
  return {fd.get(), 0, ipc::sealed_bytes(fd.get(), "the memory of a checkpoint"), ipc::Access::read};
}

std::span<const std::byte> bytes_of(const ipc::Mapping& mapping) { return {mapping.data(), mapping.size()}; }

/// A host of another user must not write as the user of a service wherever that may. Throws CheckpointError.
void check_below(const std::filesystem::path& directory, const std::filesystem::path& asked) {
  const auto below = std::filesystem::weakly_canonical(asked).lexically_relative(
      std::filesystem::weakly_canonical(directory));
  if (directory.empty() || below.empty() || *below.begin() == "..")
    throw CheckpointError(
        fmt::format("a service writes checkpoints only below its own checkpoint.directory, '{}', "
                    "and not to '{}'",
                    directory.string(), asked.string()));
}

/// Each memfd begins with the image of a file. The description holds the sizes of the images.
checkpoint::Written write_files(const CheckpointConfig& config, const protocol::Save& save,
                                const std::function<void()>& confine) {
  if (!save.missing.empty()) throw CheckpointError(save.missing);
  const auto model = map(save.model), training = map(save.training), text = map(save.description);
  constexpr const char* what = "the description of a checkpoint";
  const auto description = base::parse_json({reinterpret_cast<const char*>(text.data()), text.size()}, what);
  const base::Fields fields(description, what);
  checkpoint::Contents contents;
  contents.step = save.step;
  if (!fields.value("metric").is_null()) contents.metric = fields.real("metric");
  contents.model = bytes_of(model).first(fields.number<std::size_t>("model_bytes", 0, model.size()));
  contents.training =
      bytes_of(training).first(fields.number<std::size_t>("training_bytes", 0, training.size()));
  contents.state = fields.value("state");
  const auto elsewhere = fields.has("directory") ? fields.text("directory") : std::string();
  if (confine && !elsewhere.empty()) check_below(config.directory, elsewhere);
  if (confine && !config.directory.empty()) confine();
  return elsewhere.empty() ? checkpoint::write(config.directory, contents, config.keep)
                           : checkpoint::write(elsewhere, contents, std::numeric_limits<std::int64_t>::max());
}

}  // namespace

bool CheckpointWriter::finish(base::Deadline deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::nanoseconds(deadline.remaining_ns()),
                           [this] { return queue_.empty(); });
}

void CheckpointWriter::write(protocol::Save save) {
  const std::lock_guard lock(mutex_);
  try {
    if (!started_) std::thread([this] { run(); }).detach();
  } catch (const std::system_error& error) {
    throw SystemError("starting the thread that writes checkpoints", error.code().value());
  }
  started_ = true;
  if (save.lock) ipc::close_in_forks(save.lock.get());
  queue_.push_back(std::move(save));
  changed_.notify_all();
}

std::shared_ptr<const checkpoint::HostFiles> CheckpointWriter::last() const {
  const std::lock_guard lock(mutex_);
  return last_;
}

void CheckpointWriter::begin_with(const std::string& path) {
  auto files = std::make_shared<const checkpoint::HostFiles>(checkpoint::open_host_files(path));
  const std::lock_guard lock(mutex_);
  last_ = std::move(files);
}

void CheckpointWriter::run() {
  for (;;) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !queue_.empty(); });
    const auto& save = queue_.front();
    lock.unlock();
    protocol::Saved saved{
        .step = save.step, .path = {}, .bytes = 0, .write_ms = 0, .error = {}, .warnings = {}};
    const auto begin = base::now_ns();
    try {
      auto written = write_files(config_, save, confine_);
      saved.path = written.path.string();
      saved.bytes = written.bytes;
      saved.warnings = std::move(written.warnings);
      if (confine_ && checkpoint::is_in(config_.directory, written.path)) begin_with(saved.path);
      base::log().info("the checkpoint of step {} is on the disk: {}, {} bytes, {:.1f} ms", save.step,
                       saved.path, saved.bytes, double(base::now_ns() - begin) / 1e6);
    } catch (const std::exception& error) {
      saved.error = error.what();
      base::log().info("the checkpoint of step {} was not written: {}", save.step, error.what());
    }
    const auto end = base::now_ns();
    saved.write_ms = double(end - begin) / 1e6;
    spans_.record({.begin_ns = begin,
                   .end_ns = end,
                   .step = save.step,
                   .attempt = 0,
                   .pid = 0,
                   .rank = -1,
                   .activity = session::Activity::write_checkpoint});
    tell_(std::move(saved));
    lock.lock();
    if (save.lock) ipc::keep_in_forks(save.lock.get());
    queue_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace accelmgr::manager
