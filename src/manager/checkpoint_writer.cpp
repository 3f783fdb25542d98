#include "manager/checkpoint_writer.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <thread>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/log.hpp"
#include "checkpoint/checkpoint.hpp"
#include "ipc/memory.hpp"

namespace accelmgr::manager {
namespace {

ipc::Mapping map(const base::UniqueFd& fd) {
  struct stat status {};
  if (fstat(fd.get(), &status) != 0) throw SystemError("fstat of a checkpoint's memory", errno);
  return {fd.get(), 0, static_cast<std::size_t>(status.st_size), ipc::Access::read};
}

std::span<const std::byte> bytes_of(const ipc::Mapping& mapping) { return {mapping.data(), mapping.size()}; }

/// Each image is what its memfd begins with; the description says how long they are.
checkpoint::Written write_files(const CheckpointConfig& config, const protocol::Save& save) {
  if (!save.missing.empty()) throw CheckpointError(save.missing);
  const auto model = map(save.model), training = map(save.training), text = map(save.description);
  const auto description = nlohmann::json::parse(reinterpret_cast<const char*>(text.data()),
                                                 reinterpret_cast<const char*>(text.data()) + text.size());
  checkpoint::Contents contents;
  contents.step = save.step;
  if (const auto& metric = description.at("metric"); metric.is_number())
    contents.metric = metric.get<double>();
  contents.model = bytes_of(model).first(description.at("model_bytes").get<std::size_t>());
  contents.training = bytes_of(training).first(description.at("training_bytes").get<std::size_t>());
  contents.state = description.at("state");
  const auto elsewhere = description.value("directory", "");
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
  if (!started_) std::thread([this] { run(); }).detach();
  started_ = true;
  queue_.push_back(std::move(save));
  changed_.notify_all();
}

void CheckpointWriter::run() {
  for (;;) {
    const auto& save = [this]() -> const protocol::Save& {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !queue_.empty(); });
      return queue_.front();
    }();
    protocol::Saved saved{
        .step = save.step, .path = {}, .bytes = 0, .write_ms = 0, .error = {}, .warnings = {}};
    const auto begin = base::now_ns();
    try {
      auto written = write_files(config_, save);
      saved.path = written.path.string();
      saved.bytes = written.bytes;
      saved.warnings = std::move(written.warnings);
      base::log().info("the checkpoint of step {} is on the disk: {}, {} bytes, {:.1f} ms", save.step,
                       saved.path, saved.bytes, double(base::now_ns() - begin) / 1e6);
    } catch (const std::exception& error) {
      saved.error = error.what();
      base::log().info("the checkpoint of step {} was not written: {}", save.step, error.what());
    }
    saved.write_ms = double(base::now_ns() - begin) / 1e6;
    tell_(std::move(saved));
    const std::lock_guard lock(mutex_);
    queue_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace accelmgr::manager
