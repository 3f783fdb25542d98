#include "data/loader.hpp"

#include <exception>

#include "base/log.hpp"
#include "data/dealing.hpp"
#include "ipc/epoch.hpp"

namespace accelmgr::data {
namespace {

constexpr std::int64_t wait_slice_ns = 20'000'000;

}  // namespace

std::vector<session::FieldEntry> field_entries(std::span<const FieldSpec> fields) {
  std::vector<session::FieldEntry> entries;
  for (const auto& f : fields)
    entries.push_back({.name = f.name,
                       .shape = f.shape,
                       .dtype = static_cast<std::int32_t>(f.dtype),
                       .offset = 0,
                       .element_bytes = f.bytes()});
  return entries;
}

Loader::Loader(std::unique_ptr<BatchSource> source, const session::Session& session,
               const session::Manifest& manifest, int batch_size, bool drop_last)
    : source_(std::move(source)),
      session_(&session),
      fields_(manifest.fields),
      open_(static_cast<std::size_t>(session.ranks())),
      batch_size_(static_cast<std::uint64_t>(batch_size)),
      drop_last_(drop_last) {
  for (int rank = 0; rank < session.ranks(); ++rank) queues_.emplace_back(session, rank);
}

bool Loader::write_element(Open& open) {
  std::vector<std::span<std::byte>> rows;
  rows.reserve(fields_.size());
  for (const auto& field : fields_)
    rows.emplace_back(open.slot + field.offset + open.elements * field.element_bytes, field.element_bytes);
  ElementWriter element(source_->fields(), std::move(rows));
  return source_->next(element);
}

bool Loader::do_work() {
  if (finished_) return false;
  const auto device = static_cast<std::size_t>(device_of(dealt_, session_->ranks()));
  auto& open = open_[device];
  if (open.slot == nullptr) open.slot = queues_[device].claim();
  if (open.slot == nullptr) return false;
  try {
    if (!write_element(open)) {
      finish({});
      return false;
    }
  } catch (const std::exception& error) {
    finish(error.what());
    return false;
  }
  ++dealt_;
  if (++open.elements == batch_size_) {
    queues_[device].publish(batch_size_);
    open = {};
  }
  return true;
}

void Loader::finish(const std::string& error) {
  finished_ = true;
  for (std::size_t device = 0; device < queues_.size(); ++device) {
    auto& open = open_[device];
    if (open.elements > 0 && !drop_last_) {
      queues_[device].publish(open.elements);
    } else {
      dropped_ += open.elements;
    }
    open = {};
    queues_[device].finish(error);
  }
  if (!error.empty()) base::log().error("the data source failed after {} elements: {}", dealt_, error);
  if (dropped_ > 0)
    base::log().info(
        "{} elements at the end of the data made no full batch and were left out (data.drop_last)", dropped_);
}

void Loader::run() {
  auto& control = session_->control();
  while (!finished_ && control.stopping.load() == 0) {
    const auto seen = ipc::load(control.finish);
    if (!do_work() && !finished_) ipc::wait_changed(control.finish, seen, wait_slice_ns, 0);
  }
}

}  // namespace accelmgr::data
